"""Frozen fp32 weights that are stored in bf16 only: ``frozen_dtype="bf16"``.

To the program, such a weight and its values are fp32. Products and embeddings read the bf16 values; other readers get a
temporary fp32 copy. Code that writes to the weight or requests its address gets an fp32 tensor, which holds the values
from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from nano_loop.kernels.memory import empty
from nano_loop.kernels.override import Override
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.optimizers import is_dense
from nano_loop.patching.ownership import rules_now
from nano_loop.patching.torch_private import (
    arguments_of,
    as_plain_tensors,
    below_autocast,
    has_lone_storage,
    version,
    without_memory,
)

_MOST = 1 << 23  # elements of a weight that a product converts to fp32 at a time
_PARTS = 64  # parts of a weight, compared one at a time
#: Methods that are not operators and read the address, those that copy, and attributes of our objects only.
_ADDRESS = frozenset(
    (
        *("data_ptr", "numpy", "__array__", "__dlpack__", "tolist", "apply_", "map_", "map2_", "resize_"),
        *("untyped_storage", "storage", "share_memory_"),
    )
)
_COPIES = frozenset(("__reduce_ex__", "__repr__"))
_FIELDS = frozenset(("numbers", "_is_param"))
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Scratch:
    """Reusable memory for the fp32 values of one product after another, which would otherwise fragment the heap."""

    def __init__(self) -> None:
        self._memory = empty(0)
        self._lock = threading.Lock()

    @contextmanager
    def widened(self, narrow: Tensor) -> Iterator[Tensor]:
        """Provide an fp32 copy of a matrix in the body. A second thread gets newly allocated memory."""
        if not self._lock.acquire(blocking=False):
            yield narrow.float()
            return
        try:
            if self._memory.numel() < narrow.numel():
                with torch.inference_mode(False):
                    self._memory = empty(narrow.numel())
            memory, is_turned = self._memory[: narrow.numel()], narrow.stride(0) == 1
            wide = memory.view(narrow.shape[::-1]).t() if is_turned else memory.view(narrow.shape)
            yield wide.copy_(narrow)
        finally:
            self._lock.release()


class Numbers:
    """The values of a weight and its views, either in bf16 (`narrow`) or in the apparent dtype (`wide`)."""

    def __init__(self, scratch: Scratch, narrow: Tensor | None, wide: Tensor | None = None) -> None:
        self.scratch, self.narrow, self.wide = scratch, narrow, wide
        self._inexact: int | None = None  # the version of values that bf16 cannot represent

    @torch.inference_mode(False)
    def widened(self) -> Tensor:
        """Return the fp32 memory that holds the values from now on."""
        if self.wide is None:
            assert self.narrow is not None
            self.wide, self.narrow = self.narrow.to(torch.float32), None
        return self.wide

    @torch.inference_mode(False)
    def narrow_again(self) -> None:
        """Store the values in bf16 again, unless the memory is shared or bf16 cannot represent them."""
        wide = self.wide
        if wide is None or version(wide) == self._inexact or not has_lone_storage(wide):
            return
        narrow = wide.to(torch.bfloat16)
        pairs = zip(narrow.chunk(_PARTS), wide.chunk(_PARTS), strict=True)
        if wide.dtype is torch.float32 and all(torch.equal(part.float(), exact) for part, exact in pairs):
            self.narrow, self.wide = narrow, None
        else:
            self._inexact = version(wide)


class NarrowWeight(Tensor):
    """An fp32 weight without memory, or a view of one, with shared `numbers`; `products` are those that round."""

    products: ClassVar[Mapping[str, Override]] = {}
    numbers: Numbers

    @staticmethod
    def of(numbers: Numbers, like: Tensor) -> NarrowWeight:
        """Return a tensor with these values and the layout of another tensor."""
        dtype = torch.float32 if numbers.wide is None else numbers.wide.dtype
        result: Any = without_memory(NarrowWeight, like.shape, like.stride(), dtype, int(like.storage_offset()))
        result.numbers = numbers
        return result  # type: ignore[no-any-return]

    def narrow_numbers(self) -> Tensor | None:
        """Return the bf16 values, or None if they are in fp32."""
        return None if self.numbers.narrow is None else self._part_of(self.numbers.narrow)

    def read(self) -> Tensor:
        """Return the values in fp32, in memory that must not be written to."""
        narrow = self.narrow_numbers()
        return self.written() if narrow is None else narrow.float()

    def written(self) -> Tensor:
        """Return the values in memory that holds them from now on."""
        return self._part_of(self.numbers.widened())

    def plain(self) -> Tensor:
        """Return a copy as a plain tensor or a plain parameter."""
        with as_plain_tensors():
            copy = self.read().clone()
            return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy

    def _part_of(self, memory: Tensor) -> Tensor:
        with as_plain_tensors(), torch.no_grad():
            return memory.as_strided(self.shape, self.stride(), self.storage_offset())

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__set__":
            # A run may have replaced `Tensor.data` by a property, which has no name before Python 3.13.
            name = "data_" if func.__self__ is Tensor.data else f"{func.__self__.__name__}_"
        if name == "data_":
            return _set_data(func, *args)
        if name == "__deepcopy__":  # not that of a temporary tensor, whose id in the memo would soon be another one's
            return args[0].plain()
        if name in _COPIES:
            return getattr(args[0].plain(), name)(*args[1:], **kwargs)
        if name == "requires_grad_" and (len(args) == 1 or args[1]):
            made_plain(args[0])
        if name in _ADDRESS:
            args = map_tensors(_written, args)
        with as_plain_tensors():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, first = kwargs or {}, args[0] if args else None
        with below_autocast():
            if func in _PRODUCTS and (result := _product(func, *args, **kwargs)) is not None:
                return result
            if func.overloadpacket is torch.ops.aten.set_ and isinstance(first, NarrowWeight):
                memory = func(torch.empty(0, dtype=first.dtype, device="cpu"), *map_tensors(_written, args[1:]))
                with as_plain_tensors():
                    _set_data(Tensor.data.__set__, first, memory)  # type: ignore[attr-defined]
                return first
            narrow = first.narrow_numbers() if isinstance(first, NarrowWeight) else None
            if func is torch.ops.aten.embedding.default and narrow is not None:
                return func(narrow, *args[1:], **kwargs).float()
            if func.is_view and isinstance(first, NarrowWeight):
                if any(isinstance(argument, torch.dtype) for argument in args):  # reinterprets the bits
                    return func(first.written(), *args[1:], **kwargs)
                views = func(first.written() if narrow is None else narrow, *args[1:], **kwargs)
                return map_tensors(lambda view: NarrowWeight.of(first.numbers, view), views)
            return _computed(func, args, kwargs)


def can_be_narrowed(weight: Tensor) -> bool:
    """Whether a weight has at least two dimensions, is dense, and does not share its memory."""
    is_shared = weight.untyped_storage().is_shared()
    return weight.dim() > 1 and is_dense(weight) and has_lone_storage(weight) and not is_shared


def narrowed(weight: nn.Parameter, scratch: Scratch) -> bool:
    """Drop the fp32 values of a frozen weight. Return whether this succeeded: weak references prevent it."""
    numbers = Numbers(scratch, weight.data.to(torch.bfloat16))
    return _exchanged(weight, nn.Parameter(NarrowWeight.of(numbers, weight), requires_grad=False))


def made_plain(weight: NarrowWeight) -> bool:
    """Turn a weight into a plain fp32 parameter for good. Return whether this succeeded: a graph may hold it."""
    return _exchanged(weight, nn.Parameter(weight.written(), requires_grad=False))


def _exchanged(weight: Tensor, other: Tensor) -> bool:
    vars(other).update({name: value for name, value in vars(weight).items() if name not in _FIELDS})
    try:
        torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _set_data(func: Any, tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, NarrowWeight):
        func(tensor, _written(value))
        return
    if not isinstance(value, NarrowWeight):
        value = NarrowWeight.of(Numbers(tensor.numbers.scratch, None, value.data), value)
    with as_plain_tensors():
        func(tensor, value)
    tensor.numbers = value.numbers


def _product(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply by the bf16 values if the model's products round, or by parts of them in fp32. None: neither applies."""
    *added, a, b = args
    narrow, rules = b.narrow_numbers() if isinstance(b, NarrowWeight) else None, rules_now()
    if narrow is None or type(a) is not Tensor or a.dtype is not torch.float32:
        return None
    if rules is not None and rules.policy is not None and not any(isinstance(item, NarrowWeight) for item in added):
        replaced = NarrowWeight.products[func.overloadpacket.__name__]

        def by_torch(*tensors: Tensor, **named: Any) -> Any:
            return func(*(tensor.float() for tensor in tensors), **named)

        call = replaced.supports(by_torch, *added, a, narrow, **kwargs)
        result = None if call is None else replaced.computed(call)
        if result is not None:
            return result
    parts, widened = -(-narrow.numel() // _MOST), b.numbers.scratch.widened
    if parts <= 1:
        with widened(narrow) as wide:
            return func(*map(_read, added), a, wide, **kwargs)
    if added:
        return None
    result = a.new_zeros(len(a), narrow.size(1))
    if narrow.size(1) > narrow.size(0):
        triples: Any = zip([a] * parts, narrow.chunk(parts, 1), result.chunk(parts, 1), strict=False)
    else:
        triples = zip(a.chunk(parts, 1), narrow.chunk(parts), [result] * parts, strict=False)
    for left, right, out in triples:
        with widened(right) as wide:
            out.addmm_(left, wide)
    return result


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with fp32 values: with copies of those that it only reads."""
    weights: dict[int, tuple[Tensor, NarrowWeight]] = {}

    def written(tensor: Any) -> Any:
        memory = _written(tensor)
        weights[id(memory)] = memory, tensor
        return memory

    named = dict(zip((argument.name for argument in arguments_of(func)), args, strict=False)) | kwargs
    for argument in arguments_of(func):
        if argument.name in named:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            named[argument.name] = map_tensors(written if is_written else _read, named[argument.name])
    result = func(**named)
    return map_tensors(lambda tensor: weights[id(tensor)][1] if id(tensor) in weights else tensor, result)


def _read(tensor: Any) -> Any:
    return tensor.read() if isinstance(tensor, NarrowWeight) else tensor


def _written(tensor: Any) -> Any:
    return tensor.written() if isinstance(tensor, NarrowWeight) else tensor
