"""The gradient of a table of which a step looks up few rows. It is dense for everybody, and known to be zero elsewhere.

torch fills a tensor of the table's size with zeros for each lookup, adds row by row, and adds up such tensors where a
table is used twice. Here the rows of all lookups are summed up in C (``rows.c``), in torch's order, into memory that
stays: before the next backward only the rows of the last one are zeros again.

The program gets a tensor that shares this memory until somebody writes to it, in whatever way: torch copies it first.
So the memory stays what functions in C have made of it, and a gradient that still shares it is known. An optimizer's
states are watched in the same way.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.double_backward import is_followed
from nano_loop.kernels.memory import BYTES, FP32, INT64, Pointer, empty, is_plain
from nano_loop.patching.patch_table import process_wide, shared_change
from nano_loop.patching.torch_private import address_of, has_lone_storage, is_unwritten, shared_until_written
from nano_loop.patching.torch_private_autograd import graph_task, in_backward

_INT32 = Pointer((torch.int32,))
KERNEL = CompiledKernel(
    "rows",
    {
        "sum_rows": (FP32, INT64, INT64, FP32, BYTES, INT64, _INT32, _INT32),
        "clear_rows": (FP32, BYTES, INT64),
        "mark_states": (FP32, FP32, BYTES),
        "adam_rows": (FP32, FP32, FP32, FP32, BYTES),
        "momentum_rows": (FP32, FP32, FP32, BYTES),
        "sgd_rows": (FP32, FP32, INT64),
        "adagrad_rows": (FP32, FP32, FP32, INT64),
    },
)


class Lookups(NamedTuple):
    """Rows that were looked up together, in a backward.

    Attributes
    ----------
    gradient : torch.Tensor
        The gradient of what they became, of shape (..., width).
    indices : torch.Tensor
        The rows, in int64.
    sources : torch.Tensor or None
        The rows of `gradient` that are those of the lookups, in int64. None: they have the same order.
    padding : int
        The row that has no gradient, or -1.
    """

    gradient: Tensor
    indices: Tensor
    sources: Tensor | None
    padding: int


class _Table(NamedTuple):
    """Memory of a gradient: what holds it, to which nobody writes, and a tensor for functions in C."""

    memory: Tensor
    raw: Tensor


class _State:
    """A contiguous state of an optimizer that functions in C read and write, while every other write is noticed.

    `raw` is a tensor with the same memory, for these functions.
    """

    def __init__(self, state: Tensor) -> None:
        self.raw = _raw(state)
        self._kept: Tensor | None = None  # the memory, if somebody writes to the state
        with suppress(RuntimeError):  # of memory that is not torch's own, writes are not noticed
            self._kept = shared_until_written(state)

    def is_in(self, state: Tensor) -> bool:
        """Whether a state is this one, and nobody else has written to it."""
        return _shares(state, self.raw)


class RowGradient:
    """The gradient of one table, and what is known of it.

    Parameters
    ----------
    weight : torch.nn.Parameter
        The table, of fp32. It is not held, not even weakly: `torch.utils.swap_tensors` refuses that.

    Attributes
    ----------
    marks : torch.Tensor
        A byte for each row, as in ``rows.c``.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.shape = weight.shape
        rows = weight.size(0)
        self.marks = torch.zeros(rows, dtype=torch.uint8, device="cpu")
        self._listed = empty(rows, dtype=torch.int64)
        self._length = 0
        self._last = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
        self._sums: _Table | None = None  # zeros, but for the rows in the gradient
        self._returned: Tensor | None = None  # what shares their memory until somebody writes to the gradient
        self._states: list[_State] = []  # whose rows are marked
        self._pending: dict[tuple[int, int], list[Lookups]] = {}
        key = id(weight)
        self._memory = weakref.ref(weight.untyped_storage(), lambda _: row_gradients.pop(key, None))
        self._lock = threading.Lock()
        self._root: Callable[[], Tensor | None] = lambda: None

    def root(self, weight: nn.Parameter) -> Tensor:
        """Return the autograd node of the table in the graph of this forward, as a tensor without elements.

        All lookups of a graph have the same one, so that their gradients are summed up together.
        """
        root: Any = self._root()
        # Of a graph before a swap of tensors, it leads to the other tensor.
        if root is None or root.grad_fn.next_functions[0][0] is not get_gradient_edge(weight).node:
            root = _Root.apply(weight, self)  # type: ignore[no-untyped-call]
            self._root = weakref.ref(root)
        if not in_backward():
            for key in [key for key in self._pending if key[0] == threading.get_ident()]:
                del self._pending[key]  # of a backward that has raised an error
        return root  # type: ignore[no-any-return]

    def add(self, lookups: Lookups) -> None:
        """Note lookups of the backward that this thread runs."""
        self._pending.setdefault((threading.get_ident(), graph_task()), []).append(lookups)

    def compute(self) -> Tensor | None:
        """Return the gradient of the lookups of the backward that this thread runs, or None if there are none."""
        lookups = self._pending.pop((threading.get_ident(), graph_task()), None)
        if lookups is None:
            return None
        gradients = [part.gradient for part in lookups]
        if is_followed(*gradients) or not all(is_plain(gradient, FP32.dtypes) for gradient in gradients):
            return self._differentiable(lookups)
        with self._lock:
            sums = self._zeros()
            for part in lookups:
                self._sum_up(part, sums.raw)
            self._returned = shared_until_written(sums.memory)
            return self._returned.detach()  # autograd keeps that without a copy, since nobody else has it

    def raw(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient for functions in C if it is the one that was computed last, and nobody has written to it.

        Parameters
        ----------
        gradient : torch.Tensor
            A contiguous one, of the table's shape.
        """
        return self._sums.raw if self._sums is not None and _shares(gradient, self._sums.raw) else None

    def marked(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Mark the rows with a nonzero state, and return the states for functions in C, whose writes keep the marks."""
        if len(states) != len(self._states) or not all(map(_State.is_in, self._states, states)):
            self._states = []  # first, so that nothing is copied
            self._states = [*map(_State, states)]
            raw = [state.raw for state in self._states]
            if raw:
                KERNEL("mark_states", raw[0], raw[1] if len(raw) > 1 else None, self.marks, *self.shape)
        return [state.raw for state in self._states]

    def forget_states(self) -> None:
        """Note that a step of all rows is taken, which then copies nothing."""
        self._states = []

    @property
    def listed(self) -> tuple[Tensor, int]:
        """The rows in the gradient, and their number."""
        return self._listed, self._length

    def _zeros(self) -> _Table:
        """Return a table of zeros: that of the last backward, if nobody else sees its memory."""
        returned, sums = self._returned, self._sums
        if returned is not None and is_unwritten(returned) and not has_lone_storage(returned):
            sums = None
        raw = None if sums is None else sums.raw
        KERNEL("clear_rows", raw, self.marks, self._listed, self._length, self.shape[1])
        self._length = 0
        if sums is None:
            self._returned = self._sums = None  # first, so that its memory may be used again
            memory = torch.zeros(self.shape, dtype=torch.float32, device="cpu")
            sums = self._sums = _Table(memory, _raw(memory))
        return sums

    def _sum_up(self, part: Lookups, sums: Tensor) -> None:
        count, width = part.indices.numel(), self.shape[1]
        self._length = KERNEL(
            "sum_rows",
            part.gradient.contiguous(),
            part.indices.contiguous(),
            *(part.sources, sums, self.marks, self._listed, self._last),
            empty(2 * count, dtype=torch.int32),
            *(count, self._length, width, part.padding),
        )

    def _differentiable(self, lookups: Sequence[Lookups]) -> Tensor:
        """Return the gradient by operators of torch, which have derivatives."""
        gradients = []
        for part, indices, sources, padding in lookups:
            rows = part if sources is None else part.index_select(0, sources)
            arguments = (rows.reshape(*indices.shape, -1), indices, self.shape[0], padding, False)
            gradients.append(torch.ops.aten.embedding_dense_backward(*arguments))
        gradient: Tensor = functools.reduce(torch.add, gradients)
        return gradient


row_gradients: dict[int, RowGradient] = process_wide("row gradients, by table", {})


def row_gradient_of(weight: Tensor) -> RowGradient | None:
    """Return the row gradient of a table, if it has been looked up in a run."""
    return row_gradients.get(id(weight))


def tracked(weight: nn.Parameter) -> RowGradient:
    """Return the row gradient of a table that is looked up in a run. It lasts as long as both."""
    rows = row_gradients.get(id(weight))
    if rows is None or rows.shape != weight.shape:
        rows = row_gradients[id(weight)] = RowGradient(weight)
    return rows


@contextmanager
def _kept() -> Iterator[None]:
    try:
        yield
    finally:
        row_gradients.clear()


def row_gradients_kept() -> AbstractContextManager[None]:
    """Keep the row gradients of tables from one step to the next, until the last run that does so has ended."""
    return shared_change("row gradients", _kept)


class _Root(torch.autograd.Function):
    """The graph node of a table. All lookups lead to it, so its backward runs after theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: RowGradient) -> Tensor:
        ctx.rows = rows
        return empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.rows.compute(), None


def _raw(tensor: Tensor) -> Tensor:
    """Return a tensor with the memory of a contiguous one, which it does not hold. Writes to it are not noticed."""
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _shares(tensor: Tensor, raw: Tensor) -> bool:
    """Whether nobody has written to a tensor that shares the memory of a raw one, from its beginning on."""
    offset = tensor.storage_offset() * tensor.element_size()
    return is_unwritten(tensor) and address_of(tensor) + offset == raw.data_ptr()
