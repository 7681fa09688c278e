"""Lazy logits: losses and reductions compute them in chunks of rows, and everything else gets the real tensor.

A `LazyLogits` has no memory. Functions that need one row at a time compute chunks of rows
(`nano_loop.kernels.head.chunks`). Views, casts and functions of each row stay lazy. Everything else gets the real
tensor, which is computed once: functions of torch by ``__torch_function__``, and operators that are called from C++ by
``__torch_dispatch__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from nano_loop.kernels.double_backward import gradients_of
from nano_loop.kernels.head.chunks import Elementwise, Plan, RowFunction, in_chunks
from nano_loop.kernels.head.head import Head, Memory, note_chunked, note_whole
from nano_loop.kernels.memory import computes_now
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.ownership import Rules
from nano_loop.patching.torch_private import (
    VERSION,
    arguments_of,
    as_plain_tensors,
    has_saved_tensor_hooks,
    in_functorch,
    without_memory,
)
from nano_loop.patching.torch_private_autograd import TENSOR_HOOKS, in_backward
from nano_loop.patching.torch_private_compiler import never_compiled

#: Attributes that a lazy tensor answers itself until it is written to: its place in the graph, and its shape.
_OWN = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "size", "dim", "numel", "nelement", "stride", "is_contiguous"),
        *("element_size", "itemsize", "nbytes", "storage_offset", "is_floating_point", "is_complex", "__len__"),
        *("requires_grad", "grad_fn", "is_leaf", "retains_grad", "grad", "output_nr", "retain_grad", "register_hook"),
        *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_inference"),
        *("is_neg", "is_conj", "get_device", "is_same_size", "names", *TENSOR_HOOKS, VERSION, "__hash__"),
        *("__class__", "__dict__", "is_signed"),
    )
)

_NODES = ("_PlacedBackward", "_DerivedBackward")
#: After these calls, the tensor's own node of the graph is in use.
_PLACES = frozenset(("grad_fn", "retain_grad", "register_hook"))


class LazyLogits(Tensor):
    """Logits of a head, or functions of each row of them, that have not been computed."""

    functions: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    head: Head  # computes the logits
    rows: Tensor  # the rows of the head's input, in the shape of this tensor without its vocabulary
    vocabulary: int  # the dimension of the vocabulary
    before: Elementwise | None  # a function that is applied to each row of logits
    parents: tuple[LazyLogits, ...]  # the tensors to which `operation` was applied
    operation: Callable[..., Tensor] | None
    sources: tuple[Tensor | None, ...]  # the head's input, weight and bias with their graph; empty without a gradient
    is_placed: bool  # whether its node of the graph has been used
    is_watched: bool  # whether the program has accessed its node of the graph
    memory: Memory | None  # holds the values once computed; None for a view
    tensor: Tensor | None  # the real tensor, once it is needed
    tensor_node: object  # the node of the graph from which it was made

    # --- the real tensor ---

    def materialize(self) -> Tensor:
        """Return the real tensor, with its place in the graph. It is computed once."""
        if self._current_tensor is None:
            with torch.enable_grad(), as_plain_tensors():
                self.tensor_node = self.grad_fn
                self.is_placed |= self._is_moved
                if not self._shares_memory or self.is_placed:
                    self.tensor = _Materialized.apply(self, self.numbers)  # type: ignore[no-untyped-call]
                else:
                    assert self.operation is not None
                    self.tensor = self.operation(*(parent.materialize() for parent in self.parents))
        assert self.tensor is not None
        return self.tensor

    def computed_again(self) -> Tensor:
        """Return a new real tensor with the original values, and with its place in the graph."""
        with torch.enable_grad(), as_plain_tensors():
            if self.operation is None:
                if in_functorch():  # its transforms do not see the graph outside them
                    return self.head.all_logits(self.rows)
                return _Materialized.apply(self, lambda: self.head.all_logits(self.rows))  # type: ignore[no-any-return, no-untyped-call]
            return self.operation(*(parent.computed_again() for parent in self.parents))

    def numbers(self) -> Tensor:
        """Return the real tensor without a graph. It is computed once."""
        with torch.no_grad(), as_plain_tensors():
            memory = self.memory
            if memory is None:
                assert self.operation is not None
                return self.operation(*(parent.numbers() for parent in self.parents))
            if memory.tensor is None:
                if self.operation is None:
                    note_whole(self.head, bool(self.sources))
                    memory.set(self.head.all_logits(self.rows))
                else:  # their original values: the program may have written to them
                    memory.set(self.operation(*(parent.computed_again().detach() for parent in self.parents)))
            assert memory.tensor is not None
            return memory.tensor

    @property
    def _is_moved(self) -> bool:
        """Whether it was returned by a custom autograd function, such as that of a module's backward hooks."""
        with as_plain_tensors():
            node: Any = self.grad_fn
            return self.requires_grad and (node is None or node.name() not in _NODES)

    @property
    def _current_tensor(self) -> Tensor | None:
        """The real tensor, or None if this one was moved since, as by a function that has written to it."""
        if self.tensor is None:
            return None
        with as_plain_tensors():
            return self.tensor if self.grad_fn is self.tensor_node else None

    @property
    def _shares_memory(self) -> bool:
        return self.memory is None

    @property
    def _is_replaced(self) -> bool:
        """Whether the graph of later results contains the real tensor instead of this one."""
        tensor = self._current_tensor
        if tensor is None:
            return False
        return (
            self.is_written or (self._shares_memory and not self.is_placed) or (tensor.is_leaf and tensor.requires_grad)
        )

    @property
    def is_written(self) -> bool:
        """Whether the real tensor has been written to."""
        return self.memory.is_written if self.memory is not None else any(p.is_written for p in self.parents)

    @property
    def is_lazy(self) -> bool:
        """Whether neither it nor a parent has been computed, and its place in the graph is still its original one."""
        return not self._is_moved and all(lazy.memory is None or lazy.memory.tensor is None for lazy in self.chain())

    def chain(self) -> Iterator[LazyLogits]:
        """Yield this tensor and its parents, recursively."""
        yield self
        for parent in self.parents:
            yield from parent.chain()

    # --- lazy results ---

    def derived(
        self,
        operation: Callable[..., Tensor],
        *others: LazyLogits,
        rows: Tensor | None = None,
        vocabulary: int | None = None,
        dtype: torch.dtype | None = None,
        before: Elementwise | None = None,
        is_copy: bool = False,
    ) -> LazyLogits:
        """Return the lazy result of an operation on this tensor, and on others with the same rows."""
        with as_plain_tensors():
            lazy = made(
                self.head,
                self.rows if rows is None else rows,
                self.vocabulary if vocabulary is None else vocabulary,
                self.dtype if dtype is None else dtype,
                Memory() if is_copy else None,
            )
            lazy.parents, lazy.operation = (self, *others), operation
            lazy.before = self.before if before is None else before
            placed: LazyLogits = _Derived.apply(self, *others, [lazy])  # type: ignore[no-untyped-call]
            if torch.is_grad_enabled():
                placed.sources = next((item.sources for item in (self, *others) if item.sources), ())
            return placed

    def detached(self) -> LazyLogits:
        """Return a twin without a graph that shares its values."""
        with as_plain_tensors():
            lazy = made(self.head, self.rows, self.vocabulary, self.dtype, self.memory)
        lazy.parents, lazy.operation = tuple(parent.detached() for parent in self.parents), self.operation
        lazy.before = self.before
        return lazy

    def reduced(self, function: RowFunction, divisor: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return a function of the rows, computed in chunks."""
        self.is_placed = True
        note_chunked(self.head)
        return in_chunks(self, Plan(self.rows.flatten(), function, divisor, self.vocabulary))

    # --- called by torch ---

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            # A run may have replaced `Tensor.data` by a property, which has another name or none.
            attribute = "data" if func.__self__ is Tensor.data else getattr(func.__self__, "__name__", "")
            name = attribute + ("_" if name == "__set__" else "")
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and name in _OWN and not first._is_replaced:
            first.is_placed |= name in _PLACES
            first.is_watched |= name == "grad_fn"
            with as_plain_tensors():
                return func(*args, **kwargs)
        if func is torch.autograd.grad or name == "backward":
            with as_plain_tensors():
                return func(*map_tensors(_in_graph, args), **map_tensors(_in_graph, kwargs))
        fused = cls.functions.get(name)
        # A checkpoint computes again when the real tensor may exist already.
        if fused is not None and computes_now() and not has_saved_tensor_hooks() and not in_backward():
            result = fused(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*map_tensors(_materialized, args), **map_tensors(_materialized, kwargs))
        # Operators that write to a tensor return it.
        is_first = isinstance(first, LazyLogits) and result is first.tensor and first.is_written
        return first if is_first else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        numbers: dict[int, tuple[Tensor, LazyLogits]] = {}

        def numbers_of(argument: Any) -> Any:
            if not isinstance(argument, LazyLogits):
                return argument
            plain = argument.numbers().detach()
            numbers[id(plain)] = plain, argument
            return plain

        result = func(*map_tensors(numbers_of, args), **map_tensors(numbers_of, kwargs or {}))
        for argument, value in zip(arguments_of(func), args, strict=False):
            if isinstance(value, LazyLogits) and argument.alias_info is not None and argument.alias_info.is_write:
                torch.autograd.graph.increment_version(value.numbers())
                value.tensor, value.is_placed = None, True  # C++ moves it to another place in the graph
        return map_tensors(lambda item: numbers[id(item)][1] if id(item) in numbers else item, result)


# torch.compile would trace how logits are computed.
for _name in ("__torch_function__", "__torch_dispatch__"):
    never_compiled(vars(LazyLogits)[_name].__func__)


def made(head: Head, rows: Tensor, vocabulary: int, dtype: torch.dtype, memory: Memory | None = None) -> LazyLogits:
    """Return lazy logits of these rows without a place in the graph."""
    shape, strides = [*rows.shape], [step * head.width for step in rows.stride()]
    shape.insert(vocabulary, head.width)
    strides.insert(vocabulary, 1)
    if memory is not None:  # laid out like torch's result of an operation on a view
        strides = [*torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()]
    lazy: Any = without_memory(LazyLogits, shape, strides, dtype)
    lazy.head, lazy.rows, lazy.vocabulary, lazy.memory = head, rows, vocabulary, memory
    lazy.before = lazy.operation = lazy.tensor = lazy.tensor_node = None
    lazy.parents, lazy.sources, lazy.is_placed, lazy.is_watched = (), (), False, False
    return lazy  # type: ignore[no-any-return]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, rules: Rules) -> Tensor:
    """Return the lazy output of a head."""
    head = Head(hidden, weight, bias, rules)
    rows = torch.arange(len(head.hidden), dtype=torch.int64, device="cpu").view(hidden.shape[:-1])
    lazy = made(head, rows, rows.dim(), weight.dtype, head.memory)
    placed: LazyLogits = _Placed.apply(hidden, weight, bias, [lazy])  # type: ignore[no-untyped-call]
    if placed.requires_grad:
        placed.sources = hidden, weight, bias
    return placed


def _materialized(argument: Any) -> Any:
    return argument.materialize() if isinstance(argument, LazyLogits) else argument


def _in_graph(argument: Any) -> Any:
    """Return the tensor that represents the argument in the graph: itself, or the real one."""
    return _materialized(argument) if isinstance(argument, LazyLogits) and argument._is_replaced else argument


class _Placed(torch.autograd.Function):
    """Puts the output of a head into the graph. The gradient is that of a linear layer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, holder: list[LazyLogits]) -> Tensor:
        ctx.set_materialize_grads(False)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(hidden if of_weight else None, weight if of_hidden else None)
        return holder[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None
        rows = gradient.reshape(-1, gradient.size(-1))
        of_hidden = None if weight is None else torch.ops.aten.matmul(gradient, weight)
        of_weight = None if hidden is None else torch.ops.aten.mm(rows.t(), hidden.reshape(-1, hidden.size(-1)))
        return of_hidden, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Derived(torch.autograd.Function):
    """Puts the result of an operation on lazy tensors into the graph."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *parents, holder = args
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*parents)
        ctx.operation = holder[0].operation
        return holder[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        parents = ctx.saved_tensors
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        inputs = [parent.computed_again() for parent in parents]
        return gradients_of(ctx, inputs, (gradient,), lambda: None, ctx.operation)


class _Materialized(torch.autograd.Function):
    """Returns the real tensor of a lazy one, and passes its gradient through."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, numbers: Callable[[], Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        return numbers().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None
