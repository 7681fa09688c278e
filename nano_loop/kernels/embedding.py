"""Lookups in large fp32 tables. The gradient of a table is dense to users, but its nonzero rows are known.

For each lookup, torch zero-fills a tensor of the table's size and adds row by row; if a table is used twice, it then
adds these tensors. Here a C function (``rows.c``) sums the rows of all lookups in torch's order into persistent memory:
before the next backward, only the rows of the last one are zeroed.

The program gets a copy-on-write tensor that shares this memory: torch copies it before any write. So only C functions
modify the memory, and a gradient that still shares it is known. An optimizer's states are tracked in the same way.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from nano_loop.kernels import override
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.double_backward import is_followed
from nano_loop.kernels.memory import BYTES, CONTIGUOUS, FP32, INT64, Pointer, computes_now, empty, has_tangent, is_plain
from nano_loop.kernels.override import Algorithm, Call, Override
from nano_loop.patching.calls.entry import is_exporting
from nano_loop.patching.operators import Kernel
from nano_loop.patching.patch_table import process_wide, shared_change
from nano_loop.patching.torch_private import (
    BAGS_KERNEL,
    address_of,
    has_lone_storage,
    is_unwritten,
    shared_until_written,
    sums_of_bags,
)
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
    """Rows that were looked up together during a backward. Their gradient is of shape (..., width).

    `indices` are the indices of the rows. `sources` are the rows of `gradient` that correspond to the indices, or None
    if they are in the same order. Both are int64. `padding` is the index of the row without a gradient, or -1.
    """

    gradient: Tensor
    indices: Tensor
    sources: Tensor | None
    padding: int


class _Table(NamedTuple):
    """The memory of a gradient: its owner, which nobody writes to, and a tensor for C functions."""

    memory: Tensor
    raw: Tensor


class _State:
    """A contiguous optimizer state that C functions write as `raw`, while all other writes are detected."""

    def __init__(self, state: Tensor) -> None:
        self.raw = _raw(state)
        self._kept: Tensor | None = None  # keeps the memory if the state is written to
        with suppress(RuntimeError):  # torch does not own the memory, so writes are undetected
            self._kept = shared_until_written(state)

    def is_in(self, state: Tensor) -> bool:
        """Whether this is the same state, and nothing else has written to it."""
        return _shares(state, self.raw)


class RowGradient:
    """The gradient of an fp32 table, which it does not reference, and the rows that are nonzero, as in ``rows.c``."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.shape = weight.shape
        rows = weight.size(0)
        self.marks = torch.zeros(rows, dtype=torch.uint8, device="cpu")
        self._listed = empty(rows, dtype=torch.int64)
        self._length = 0
        self._last = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
        self._sums: _Table | None = None  # zeros, except for the rows in the gradient
        self._returned: Tensor | None = None  # shares their memory until the gradient is written to
        self._states: list[_State] = []  # their rows are marked
        self._pending: dict[tuple[int, int], list[Lookups]] = {}
        key = id(weight)
        self._memory = weakref.ref(weight.untyped_storage(), lambda _: row_gradients.pop(key, None))
        self._lock = threading.Lock()
        self._root: Callable[[], Tensor | None] = lambda: None

    def root(self, weight: nn.Parameter) -> Tensor:
        """Return the table's autograd node in this forward's graph, shared by its lookups so that gradients add up."""
        root: Any = self._root()
        # A graph from before `swap_tensors` leads to the other tensor.
        if root is None or root.grad_fn.next_functions[0][0] is not get_gradient_edge(weight).node:
            root = _Root.apply(weight, self)  # type: ignore[no-untyped-call]
            self._root = weakref.ref(root)
        if not in_backward():
            for key in [key for key in self._pending if key[0] == threading.get_ident()]:
                del self._pending[key]  # from a backward that raised an error
        return root  # type: ignore[no-any-return]

    def add(self, lookups: Lookups) -> None:
        """Record lookups of this thread's current backward."""
        self._pending.setdefault((threading.get_ident(), graph_task()), []).append(lookups)

    def compute(self) -> Tensor | None:
        """Return the gradient of the lookups in this thread's current backward, or None if there are none."""
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
            return self._returned.detach()  # autograd keeps this without a copy, as the only owner

    def raw(self, gradient: Tensor) -> Tensor | None:
        """Return the contiguous gradient for C functions if it was computed last and has not been written to."""
        return self._sums.raw if self._sums is not None and _shares(gradient, self._sums.raw) else None

    def marked(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Mark the rows with a nonzero state, and return the states for C functions, whose writes keep the marks."""
        if len(states) != len(self._states) or not all(map(_State.is_in, self._states, states)):
            self._states = []  # cleared first, so that nothing is copied
            self._states = [*map(_State, states)]
            raw = [state.raw for state in self._states]
            if raw:
                KERNEL("mark_states", raw[0], raw[1] if len(raw) > 1 else None, self.marks, *self.shape)
        return [state.raw for state in self._states]

    def forget_states(self) -> None:
        """Note that a step updates all rows, so that it copies nothing."""
        self._states = []

    @property
    def listed(self) -> tuple[Tensor, int]:
        """The indices of the rows in the gradient, and their number."""
        return self._listed, self._length

    def _zeros(self) -> _Table:
        """Return a table of zeros, reusing that of the last backward if nothing else references its memory."""
        returned, sums = self._returned, self._sums
        if returned is not None and is_unwritten(returned) and not has_lone_storage(returned):
            sums = None
        raw = None if sums is None else sums.raw
        KERNEL("clear_rows", raw, self.marks, self._listed, self._length, self.shape[1])
        self._length = 0
        if sums is None:
            self._returned = self._sums = None  # cleared first, so that the memory can be reused
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
        """Return the gradient by torch operators, which are differentiable."""
        gradients = []
        for part, indices, sources, padding in lookups:
            rows = part if sources is None else part.index_select(0, sources)
            arguments = (rows.reshape(*indices.shape, -1), indices, self.shape[0], padding, False)
            gradients.append(torch.ops.aten.embedding_dense_backward(*arguments))
        gradient: Tensor = functools.reduce(torch.add, gradients)
        return gradient


row_gradients: dict[int, RowGradient] = process_wide("row gradients, by table", {})


def row_gradient_of(weight: Tensor) -> RowGradient | None:
    """Return the row gradient of a table if it has been looked up in a run."""
    return row_gradients.get(id(weight))


def tracked(weight: nn.Parameter) -> RowGradient:
    """Return the row gradient of a table that is looked up in a run. It lasts until either is gone."""
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
    """Keep the row gradients of tables between steps until the last run that does so ends."""
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
    """Return a tensor that aliases a contiguous tensor without owning its memory. Writes to it are not detected."""
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _shares(tensor: Tensor, raw: Tensor) -> bool:
    """Whether a tensor still shares the memory of a raw tensor, with the same start, because nothing wrote to it."""
    offset = tensor.storage_offset() * tensor.element_size()
    return is_unwritten(tensor) and address_of(tensor) + offset == raw.data_ptr()


#: Minimum number of elements in a table. torch zero-fills a smaller one in the time of the Python overhead.
MIN_ELEMENTS = 1 << 18
_SUM = 0  # torch's enum value of the mode


def _embedding(
    kernel: Kernel, weight: Tensor, indices: Tensor, padding: int = -1, *flags: bool, **named: Any
) -> Call | None:
    if any(flags) or any(named.values()) or not _is_supported(weight, indices):
        return None
    return Call("embedding", (weight,), (indices, padding))


def _embedding_bag(
    kernel: Kernel,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    sample_weights: Tensor | None = None,
    with_last_offset: bool = False,
    padding: int = -1,
) -> Call | None:
    is_simple = not by_frequency and mode == _SUM and not sparse and sample_weights is None
    if not (is_simple and _is_supported(weight, indices)):
        return None
    arguments = (indices, offsets, by_frequency, mode, sparse, sample_weights, with_last_offset, padding)
    return Call("embedding_bag", (weight,), arguments)


def _by_rows(function: type[torch.autograd.Function], call: Call) -> Any:
    (weight,) = call.tensors
    rows = tracked(weight)
    return function.apply(rows.root(weight), rows, weight.detach(), *call.numbers)  # type: ignore[no-untyped-call]


def _is_supported(weight: Tensor, indices: Tensor) -> TypeGuard[nn.Parameter]:
    """Whether a lookup can use a row gradient: the table is a large, plain parameter, and it is computed now."""
    return bool(
        type(weight) is nn.Parameter
        and weight.numel() >= MIN_ELEMENTS
        and weight.requires_grad
        and torch.is_grad_enabled()
        and weight.dim() == 2
        and is_plain(weight, override.FP32, CONTIGUOUS)
        and is_plain(indices, (torch.int64, torch.int32))
        and not is_exporting()
        and computes_now()
        and not has_tangent(weight)
    )


class _Rows(torch.autograd.Function):
    """Computes ``aten::embedding``."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, rows: RowGradient, weight: Tensor, indices: Tensor, padding: int) -> Tensor:
        ctx.root, ctx.rows, ctx.padding = root, rows, padding
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return torch.ops.aten.embedding(weight, indices)  # type: ignore[no-any-return]  # no view: a program may write into it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        if gradient is not None:
            (indices,) = ctx.saved_tensors
            ctx.rows.add(Lookups(gradient, indices.to(torch.int64), None, ctx.padding))
        return (None,) * 5


class _Bags(torch.autograd.Function):
    """Computes ``aten::_embedding_bag`` for sums."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, rows: RowGradient, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        indices, offsets, *_, padding = arguments
        bags, *others = sums_of_bags(weight, *arguments)
        ctx.root, ctx.rows, ctx.padding = root, rows, padding
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices, offsets)
        ctx.mark_non_differentiable(*others)
        return bags, *others

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[None, ...]:
        if gradient is not None:
            indices, offsets = (tensor.to(torch.int64) for tensor in ctx.saved_tensors)
            places = torch.arange(len(indices), dtype=torch.int64, device="cpu")
            sources = torch.searchsorted(offsets, places, right=True) - 1
            ctx.rows.add(Lookups(gradient, indices, sources, ctx.padding))
        return (None,) * len(ctx.needs_input_grad)


OVERRIDES = tuple(
    Override(
        operator,
        (Algorithm("rows", functools.partial(_by_rows, function), override.FP32, kernel=KERNEL.name, is_raced=False),),
        supports,
        dispatch_key="AutogradCPU",
    )
    for operator, function, supports in (("embedding", _Rows, _embedding), (BAGS_KERNEL, _Bags, _embedding_bag))
)
