"""The gradient of a table of which a step looks up few rows. It is dense for everybody, and known to be zero elsewhere.

torch fills a tensor of the table's size with zeros for each lookup, adds row by row, and adds up such tensors where a
table is used twice. Here the rows of all lookups are summed up in C (``rows.c``), in torch's order, into a tensor that
stays: before the next backward only the rows of the last one are zeros again. That is so where nobody else can have
written into it. Else the next gradient is a new tensor.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.double_backward import is_followed
from nano_loop.kernels.memory import BYTES, FP32, INT64, Pointer, empty
from nano_loop.patching.objects.gradients import on_read, on_state_read, reads_noticed
from nano_loop.patching.patch_table import process_wide, shared_change
from nano_loop.patching.torch_private import has_lone_storage, version
from nano_loop.patching.torch_private_autograd import graph_task, has_tensor_hooks, in_backward

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


class RowGradient:
    """The gradient of one table, and what is known of it.

    Parameters
    ----------
    weight : torch.nn.Parameter
        The table, of fp32. It is not held.

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
        self._sums: Tensor | None = None
        self._version = 0
        self._is_known = False  # whether nobody has seen the gradient since the backward that has computed it
        self._is_confirmed = False  # whether a step has then been taken with it as the gradient of the table
        self._states: list[tuple[int, int]] | None = None  # whose rows are marked
        self._pending: dict[tuple[int, int], list[Lookups]] = {}
        key = id(weight)
        self._weight = weakref.ref(weight, lambda _: _drop(key))
        self._lock = threading.Lock()
        self._root: Callable[[], Tensor | None] = lambda: None

    def root(self, weight: nn.Parameter) -> Tensor:
        """Return the autograd node of the table in the graph of this forward, as a tensor without elements.

        All lookups of a graph have the same one, so that their gradients are summed up together.
        """
        root = self._root()
        if root is None:
            root = _Root.apply(weight, self)  # type: ignore[no-untyped-call]
            self._root = weakref.ref(root)
        if not in_backward():
            for key in [key for key in self._pending if key[0] == threading.get_ident()]:
                del self._pending[key]  # of a backward that has raised an error
        return root

    def add(self, lookups: Lookups) -> None:
        """Note lookups of the backward that this thread runs."""
        self._pending.setdefault((threading.get_ident(), graph_task()), []).append(lookups)

    def compute(self) -> Tensor | None:
        """Return the gradient of the lookups of the backward that this thread runs, or None if there are none."""
        lookups = self._pending.pop((threading.get_ident(), graph_task()), None)
        if lookups is None:
            return None
        if is_followed(*(part.gradient for part in lookups)) or not all(_is_plain(part.gradient) for part in lookups):
            return self._differentiable(lookups)
        with self._lock:
            sums = self._zeros()
            for part in lookups:
                self._sum_up(part, sums)
            weight = self._weight()
            self._is_known = weight is not None and not has_tensor_hooks(weight)
            self._is_confirmed = False
            self._version = version(sums)
            return sums.detach()  # autograd keeps that without a copy, since nobody else has it

    def forget(self) -> None:
        """Note that somebody reads the gradient, and may change it or the states of the table."""
        self._is_known = False
        self._states = self._sums = None

    def confirm(self, gradient: Tensor) -> bool:
        """Return whether the gradient in a step is the one that was computed last: zero in rows without a mark.

        The step may not change it: the tensor stays for the next one.
        """
        sums = self._sums
        self._is_confirmed = (
            self._is_known
            and sums is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == sums.data_ptr()
            and gradient.shape == self.shape
            and gradient.is_contiguous()
            and version(gradient) == version(sums) == self._version
        )
        return self._is_confirmed

    def mark(self, *states: Tensor) -> None:
        """Mark the rows with a nonzero state, unless these are the states that the last step has left."""
        if self._states != _signs(states):
            other = states[1] if len(states) > 1 else None
            KERNEL("mark_states", states[0], other, self.marks, *self.shape)

    def forget_states(self) -> None:
        """Note that a step of all rows is taken."""
        self._states = None

    def forget_states_in(self, states: Mapping[Tensor, Any]) -> None:
        """Note that somebody reads the states of an optimizer, and may change those of the table."""
        weight = self._weight()
        if weight is not None and weight in states:
            self._states = None

    def know(self, *states: Tensor) -> None:
        """Note that the marks are those of states that a step has left."""
        self._states = _signs(states)

    @property
    def listed(self) -> tuple[Tensor, int]:
        """The rows in the gradient, and their number."""
        return self._listed, self._length

    def _zeros(self) -> Tensor:
        """Return a table of zeros: that of the last backward, if it is nobody else's."""
        sums, width = self._sums, self.shape[1]
        is_ours = (
            sums is not None
            and self._is_known
            and self._is_confirmed
            and version(sums) == self._version
            and has_lone_storage(sums)
        )
        KERNEL("clear_rows", sums if is_ours else None, self.marks, self._listed, self._length, width)
        self._length = 0
        if sums is None or not is_ours:
            sums = self._sums = None  # first, so that its memory may be used again
            sums = self._sums = torch.zeros(self.shape, dtype=torch.float32, device="cpu")
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
        on_read[id(weight)] = rows.forget
        on_state_read[id(weight)] = rows.forget_states_in
    return rows


def _drop(key: int) -> None:
    row_gradients.pop(key, None)
    on_read.pop(key, None)
    on_state_read.pop(key, None)


@contextmanager
def _kept() -> Iterator[None]:
    with reads_noticed():
        try:
            yield
        finally:
            for key in [*row_gradients]:
                _drop(key)


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


def _is_plain(gradient: Tensor) -> bool:
    """Whether a gradient has numbers in memory that a C function reads, once they are contiguous."""
    is_strided = type(gradient) is Tensor and gradient.layout is torch.strided
    return is_strided and gradient.dtype is torch.float32 and not gradient.is_neg()


def _signs(states: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return addresses and versions of states, which differ after a change or for other states."""
    return [(state.data_ptr(), version(state)) for state in states]
