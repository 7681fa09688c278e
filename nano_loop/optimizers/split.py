"""bf16 weights with the low bits of fp32 ones stored separately, so that no update of an optimizer is lost.

A split weight consists of the nearest bf16 number (the larger one of two equally near ones) and a signed rest of 16
bits. Together they are an fp32 number, bit-identical. Only infinity, NaN, and numbers that would be rounded to infinity
are truncated instead of rounded. Intel's Split-SGD stores such halves, truncated.

A rest is valid only for the weights that it was computed from. Any other write to a weight changes the checksum of its
block, and the block's rests are then read as 0. `kernels/csrc/optimizers.c` has the same constants and checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nano_loop.kernels.memory import empty
from nano_loop.patching.optimizers import is_dense, laid_out_as, lies_as

_BLOCK = 512  # numbers per checksum
_PIECE = 512 * _BLOCK  # numbers that are converted at a time
_SIZE, _LARGEST, _HALF = 0x7FFFFFFF, 0x7F7F0000, 0x8000  # see `split` in C
_MIXERS = (0x9E3779B1 - (1 << 32), 0x85EBCA77 - (1 << 32), 0x846CA68B - (1 << 32))


class Rest(NamedTuple):
    """The int16 differences of some bf16 weights from fp32 ones, in the order of memory, with checksums of blocks."""

    storage: StorageWeakRef
    numbers: Tensor
    checksums: Tensor

    @property
    def is_freed(self) -> bool:
        """Whether the weights have been freed."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class SplitWeights:
    """The rests of a run's bf16 weights, by the weights' addresses. They are freed after the weights."""

    def __init__(self) -> None:
        self._rests: dict[int, Rest] = {}
        self._room = 0  # number of entries at which freed ones are searched for
        self.ends: dict[Callable[[], None], None] = {}  # end the steps, during which weights are in fp32

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # weak references to storages are copied as numbers, and freed twice

    def end_steps(self) -> None:
        """End the steps that have raised: torch calls no hook then, and the loop may go on."""
        for end in [*self.ends]:
            end()

    def __contains__(self, data: Tensor) -> bool:
        rest = self._rests.get(data.data_ptr())
        return rest is not None and not rest.is_freed

    def of(self, data: Tensor) -> Rest:
        """Return the rests of weights: zeros if there were none."""
        address = data.data_ptr()
        rest = self._rests.get(address)
        if rest is None or rest.is_freed or len(rest.numbers) != data.numel():
            if len(self._rests) >= self._room:
                self._rests = {place: rest for place, rest in self._rests.items() if not rest.is_freed}
                self._room = 2 * len(self._rests) + 16
            numbers = empty(data.numel(), dtype=torch.int16).zero_()
            checksums = empty(-(-data.numel() // _BLOCK), dtype=torch.int32).zero_()
            storage = StorageWeakRef(data.untyped_storage())  # type: ignore[no-untyped-call]
            rest = self._rests[address] = Rest(storage, numbers, checksums)
        return rest

    def narrowed(self, data: Tensor, split: Collection[int]) -> Tensor:
        """Return weights in bf16, with their rests if they are fp32 and their address is in `split`."""
        if data.dtype is not torch.float32 or data.data_ptr() not in split:
            return data.to(torch.bfloat16)
        result = torch.empty_like(data, dtype=torch.bfloat16)
        self.write(result, data)
        return result

    def write(self, into: Tensor, wide: Tensor) -> None:
        """Write fp32 numbers to bf16 weights and their rests."""
        rest = self.of(into)
        if not lies_as(wide, into):
            wide = laid_out_as(into, wide) if is_dense(into) else wide.contiguous()
        weights = _flat(into)
        for begin, bits in _pieces(_flat(wide).view(torch.int32)):
            size, end = bits & _SIZE, begin + len(bits)
            is_taken = (size >= _LARGEST - _HALF) & (size < _LARGEST)
            bits = torch.where(is_taken, bits - size + (_LARGEST - _HALF - 1), bits)
            uppers = torch.where(size < _LARGEST + _HALF, bits + _HALF, bits) >> 16
            weights.view(torch.int16)[begin:end] = uppers.to(torch.int16)
            rest.numbers[begin:end] = bits.to(torch.int16)
            rest.checksums[begin // _BLOCK : -(-end // _BLOCK)] = _checksums(uppers)
        if not is_dense(into):
            into.copy_(weights.view(into.shape))

    def wide(self, data: Tensor) -> Tensor:
        """Return bf16 weights, or a storage with several of them, in fp32."""
        inside = [*self._inside(data)]
        data = data if is_dense(data) else data.contiguous()
        result = data.to(torch.float32)
        for first, rest in inside:
            weights = _flat(data).view(torch.int16)[first:]
            for begin, numbers in _pieces(rest.numbers):
                end = begin + len(numbers)
                is_valid = _checksums(weights[begin:end].to(torch.int32))
                is_valid = is_valid == rest.checksums[begin // _BLOCK : -(-end // _BLOCK)]
                bits = _flat(result).view(torch.int32)[first + begin : first + end]
                lacking = numbers.to(torch.int32)
                lacking = torch.where((bits & _SIZE) < _LARGEST, lacking, lacking & 0xFFFF)
                bits += lacking * is_valid.repeat_interleave(_BLOCK)[: len(lacking)]
        return result

    def restored(self, data: Tensor) -> Tensor:
        """Return bf16 weights in fp32, and free their rests."""
        result = self.wide(data)
        self._rests.pop(data.data_ptr(), None)
        return result

    def clear(self) -> None:
        """Forget all rests."""
        self._rests.clear()

    def _inside(self, data: Tensor) -> Iterator[tuple[int, Rest]]:
        """Yield the rests of weights in this memory, with the places of the weights in it."""
        start, count = data.data_ptr(), data.numel()
        exact = self._rests.get(start)
        if exact is not None and len(exact.numbers) == count and not exact.is_freed:
            yield 0, exact
            return
        for address, rest in self._rests.items():
            first = (address - start) // data.itemsize
            if first >= 0 and first + len(rest.numbers) <= count and not rest.is_freed:
                yield first, rest


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in the order of memory: a view, or a copy if there are gaps or overlaps."""
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.contiguous().view(-1)


def _pieces(numbers: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(numbers), _PIECE):
        yield begin, numbers[begin : begin + _PIECE]


def _checksums(uppers: Tensor) -> Tensor:
    """Return a sum over each block of bf16 numbers, which are in int32, by pairs with their places."""
    pairs = torch.nn.functional.pad(uppers & 0xFFFF, (0, len(uppers) % 2)).view(-1, 2)
    pairs = pairs[:, 0] | pairs[:, 1] << 16
    places = torch.arange(len(pairs), dtype=torch.int32, device="cpu") % (_BLOCK // 2)
    mixed = (pairs + places * _MIXERS[0]) * _MIXERS[1]
    mixed = (mixed ^ (mixed >> 15 & 0x1FFFF)) * _MIXERS[2]
    blocks = torch.nn.functional.pad(mixed, (0, -len(mixed) % (_BLOCK // 2)))
    sums = blocks.view(-1, _BLOCK // 2).sum(1)
    return sums.to(torch.int32)
