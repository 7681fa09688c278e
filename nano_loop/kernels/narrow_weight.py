"""Frozen weights in fp32 of which there are the bf16 numbers alone: ``frozen_dtype="bf16"``.

To the program such a weight is in fp32, as are its values. Products and embeddings read the bf16 numbers; what else
reads it gets them in fp32 for the moment. Who writes to it, or asks for its address, gets a tensor in fp32, which has
the numbers from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from nano_loop.kernels.override import Override
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.objects.optimizers import is_dense
from nano_loop.patching.ownership import rules_now
from nano_loop.patching.torch_private import (
    arguments_of,
    as_plain_tensors,
    below_autocast,
    has_lone_storage,
    returns_of,
    version,
    without_memory,
)

#: Of a weight, how many numbers are in fp32 at a time in a product, and while they are rounded.
_MOST = 1 << 24
#: Methods and functions of tensors that are no operators, and take the address.
_ADDRESS = frozenset(
    (
        *("data_ptr", "numpy", "__array__", "__dlpack__", "tolist", "apply_", "map_", "map2_", "set_", "resize_"),
        *("untyped_storage", "storage", "share_memory_"),
    )
)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Numbers:
    """The numbers of a weight and of its views.

    Parameters
    ----------
    tensor : torch.Tensor
        In bf16, or in the dtype that they seem to have.

    Attributes
    ----------
    narrow, wide : torch.Tensor or None
        The numbers: one of the two.
    """

    def __init__(self, tensor: Tensor) -> None:
        is_narrow = tensor.dtype is torch.bfloat16
        self.narrow, self.wide = (tensor, None) if is_narrow else (None, tensor)
        self._rounded: int | None = None  # the version of what bf16 could not hold

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return sum(tensor.nbytes for tensor in (self.narrow, self.wide) if tensor is not None)

    def widened(self) -> Tensor:
        """Return the memory in fp32 that has the numbers from now on."""
        if self.wide is None:
            assert self.narrow is not None
            with torch.inference_mode(False), torch.no_grad(), below_autocast():
                self.wide, self.narrow = self.narrow.to(torch.float32), None
        return self.wide

    def narrow_again(self) -> bool:
        """Keep the numbers in bf16, unless somebody else has the memory, or bf16 cannot hold them."""
        wide = self.wide
        if wide is None:
            return True
        if wide.dtype is torch.float32 and version(wide) != self._rounded and has_lone_storage(wide):
            self.narrow = rounded(wide, exactly=True)
            self.wide, self._rounded = (wide, version(wide)) if self.narrow is None else (None, None)
        return self.wide is None


@torch.inference_mode(False)
def rounded(data: Tensor, exactly: bool = False) -> Tensor | None:
    """Return a dense tensor in bf16, or None where that has to be exact and is not."""
    with torch.no_grad(), below_autocast():
        result = torch.empty_like(data, dtype=torch.bfloat16)
        flat, source = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (result, data))
        for part, numbers in zip(flat.split(_MOST), source.split(_MOST), strict=True):
            part.copy_(numbers)
            if exactly and not torch.equal(part.to(data.dtype), numbers):
                return None
        return result


class NarrowWeight(Tensor):
    """A weight in fp32 without memory, or a view of it.

    Attributes
    ----------
    numbers : Numbers
        Its numbers, which its views have, too.
    products : dict
        What computes products that round, by the operator.
    """

    products: ClassVar[Mapping[str, Override]] = {}
    numbers: Numbers

    @staticmethod
    def of(numbers: Numbers, like: Tensor) -> NarrowWeight:
        """Return a tensor of numbers, which lie as those of another tensor."""
        dtype = torch.float32 if numbers.wide is None else numbers.wide.dtype
        result: Any = without_memory(NarrowWeight, like.shape, like.stride(), dtype, like.storage_offset())
        result.numbers = numbers
        return result  # type: ignore[no-any-return]

    def narrow_numbers(self) -> Tensor | None:
        """Return the numbers in bf16, or None if they are in fp32."""
        return None if self.numbers.narrow is None else self._part_of(self.numbers.narrow)

    def read(self) -> Tensor:
        """Return the numbers in fp32, in memory that may not be written to."""
        narrow = self.narrow_numbers()
        return self.written() if narrow is None else narrow.to(torch.float32)

    def written(self) -> Tensor:
        """Return the numbers in memory that is theirs from now on."""
        return self._part_of(self.numbers.widened())

    def _part_of(self, memory: Tensor) -> Tensor:
        with as_plain_tensors(), torch.no_grad(), below_autocast():
            return memory.as_strided(self.shape, self.stride(), self.storage_offset())

    # --- what torch asks ---

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name == "__set__":
            name = f"{func.__self__.__name__}_"
        if name == "data_":
            return _set_data(func, *args)
        if name == "requires_grad_" and isinstance(first, NarrowWeight) and (len(args) == 1 or args[1]):
            made_plain(first)
        if name in _ADDRESS:
            args = map_tensors(_written, args)
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        with below_autocast():
            if func in _PRODUCTS and (result := _product(func, *args, **kwargs)) is not None:
                return result
            first = args[0] if args else None
            if isinstance(first, NarrowWeight):
                if func is torch.ops.aten.embedding.default and first.numbers.wide is None:
                    return func(first.narrow_numbers(), *args[1:], **kwargs).to(torch.float32)
                if _is_view(func):
                    return _views(func, first, *args[1:], **kwargs)
            return _computed(func, args, kwargs)

    # --- copies ---

    def plain(self) -> Tensor:
        """Return a copy that is a plain tensor, or a plain parameter."""
        with torch.no_grad():
            copy = self.read() if self.numbers.wide is None else self.written().clone()
        with as_plain_tensors():
            return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.plain()
        return memo[id(self)]  # type: ignore[no-any-return]

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    @override
    def __repr__(self, **named: Any) -> str:
        return self.plain().__repr__(**named)


def narrowed(weight: nn.Parameter) -> bool:
    """Give up the fp32 numbers of a frozen weight. Return whether it could be done: no graph may hold the weight."""
    with torch.no_grad():
        numbers = rounded(weight.data)
    assert numbers is not None
    narrow = nn.Parameter(NarrowWeight.of(Numbers(numbers), weight), requires_grad=False)
    return _exchanged(weight, narrow)


def made_plain(weight: NarrowWeight) -> bool:
    """Make a plain parameter in fp32 of a weight, for good. Return whether it could be done."""
    return _exchanged(weight, nn.Parameter(weight.written(), requires_grad=False))


def can_be_narrowed(weight: Tensor) -> bool:
    """Whether a parameter is one of which bf16 numbers are enough, and whose memory nobody else has."""
    return weight.dim() > 1 and is_dense(weight) and has_lone_storage(weight) and not weight.untyped_storage().is_shared()


def _exchanged(weight: Tensor, other: Tensor) -> bool:
    vars(other).update({name: value for name, value in vars(weight).items() if name not in _FIELDS})
    try:
        torch.utils.swap_tensors(weight, other)
    except RuntimeError:
        return False
    return True


_FIELDS = frozenset(("numbers", "_is_param"))


def _set_data(func: Any, tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, NarrowWeight):
        func(tensor, _written(value))
        return
    data = value if isinstance(value, NarrowWeight) else NarrowWeight.of(Numbers(value.data), value)
    with as_plain_tensors():
        func(tensor, data)
    tensor.numbers = data.numbers


def _product(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply by the bf16 numbers, if the model's products round, or by parts of them; None: neither."""
    *added, a, b = args
    narrow = b.narrow_numbers() if isinstance(b, NarrowWeight) else None
    if narrow is None or type(a) is not Tensor or a.dtype is not torch.float32:
        return None
    added = [*map(_read, added)]
    rules = rules_now()
    if rules is not None and rules.policy is not None:
        replaced = NarrowWeight.products[func.overloadpacket.__name__]

        def by_torch(*tensors: Tensor, **named: Any) -> Any:
            return func(*(tensor.float() for tensor in tensors), **named)

        call = replaced.supports(by_torch, *added, a, narrow, **kwargs)
        result = None if call is None else replaced.computed(call)
        if result is not None:
            return result
    if added or kwargs or narrow.numel() <= _MOST:
        return None
    return _in_parts(a, narrow)


def _in_parts(a: Tensor, b: Tensor) -> Tensor:
    """Multiply by a matrix in bf16 of which some columns, or rows, are in fp32 at a time."""
    depth, columns = b.shape
    result = a.new_zeros(len(a), columns)
    for part in _parts(columns, depth) if columns > depth else _parts(depth, columns):
        if columns > depth:
            torch.ops.aten.mm.out(a, b[:, part].float(), out=result[:, part])
        else:
            result.addmm_(a[:, part], b[part].float())
    return result


def _parts(length: int, other: int) -> Iterator[slice]:
    size = max(_MOST // other, 1)
    return (slice(start, start + size) for start in range(0, length, size))


def _views(func: Any, weight: NarrowWeight, *args: Any, **kwargs: Any) -> Any:
    """Return views of a weight: plain ones where they show the bits."""
    if any(isinstance(argument, torch.dtype) for argument in args):
        return func(weight.written(), *args, **kwargs)
    narrow = weight.narrow_numbers()
    views = func(weight.written() if narrow is None else narrow, *args, **kwargs)
    return map_tensors(lambda view: NarrowWeight.of(weight.numbers, view), views)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with numbers in fp32: memory of its own for what it only reads."""
    weights: dict[int, tuple[Tensor, NarrowWeight]] = {}

    def written(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, NarrowWeight):
            return tensor
        memory = tensor.written()
        weights[id(memory)] = memory, tensor
        return memory

    values, named = [*args], {**kwargs}
    for place, argument in enumerate(arguments_of(func)):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        numbers_of = written if is_written else _read
        if place < len(values):
            values[place] = map_tensors(numbers_of, values[place])
        elif argument.name in named:
            named[argument.name] = map_tensors(numbers_of, named[argument.name])
    result = func(*values, **named)
    return map_tensors(lambda tensor: weights[id(tensor)][1] if id(tensor) in weights else tensor, result)


def _is_view(func: Any) -> bool:
    """Whether an operator returns views."""
    aliases = [result.alias_info for result in returns_of(func)]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _read(tensor: Any) -> Any:
    return tensor.read() if isinstance(tensor, NarrowWeight) else tensor


def _written(tensor: Any) -> Any:
    return tensor.written() if isinstance(tensor, NarrowWeight) else tensor
