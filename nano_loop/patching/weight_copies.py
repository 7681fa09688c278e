"""Copies of weights, such as rounded ones, each valid until the weight may have been written to.

torch can mark memory as copy-on-write. Here the memory has no second owner, so nothing is ever copied: a request for
the writable address only removes the mark. In-place operators make such requests, even through ``.data`` or from
another thread, and so do numpy, DLPack, other libraries, and this package's C functions. This works without knowing the
writers or replacing any attribute. Reading keeps the mark, except for a few readers that request a writable address;
the copy is then made again.

An address that was taken before the copy was made is not requested again. So no copy is made while anything else shares
the memory, such as an array. Foreign memory cannot be marked: that of a mapped file, of numpy, or shared with other
processes. Writes through an address that a program keeps as a number remain undetected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.patching.torch_private import (
    address_of,
    below_autocast,
    has_lone_storage,
    is_unwritten,
    shared_until_written,
    version,
)


class Unwritten(NamedTuple):
    """The state of a weight when it was marked: its storage, its location in this memory, and its version.

    The weight itself is not referenced, not even weakly: `torch.utils.swap_tensors` rejects that.
    """

    memory: weakref.ref[torch.UntypedStorage]
    place: tuple[Any, ...]

    def is_still(self, weight: Tensor) -> bool:
        """Whether this is the same weight, and nothing may have written to it since."""
        return is_unwritten(weight) and _place_of(weight) == self.place

    def end(self) -> None:
        """Remove the mark, which copies nothing."""
        storage = self.memory()
        if storage is not None:
            storage.data_ptr()


def takes_mark(weight: Tensor) -> bool:
    """Whether torch owns the memory of a strided tensor, so that a mark can detect writes. Removes any mark."""
    with torch.no_grad():
        try:
            shared_until_written(weight.detach())
        except RuntimeError:
            return False
    weight.data_ptr()
    return True


def marked(weight: Tensor, freed: Callable[[Any], None] | None = None) -> Unwritten | None:
    """Mark a strided CPU tensor's memory, calling `freed` at its end, or return None if writes could go undetected."""
    if not has_lone_storage(weight):
        return None
    with torch.no_grad(), suppress(RuntimeError):  # torch does not own the memory
        shared_until_written(weight.detach())
        return Unwritten(weakref.ref(weight.untyped_storage(), freed), _place_of(weight))
    return None


class WeightCopies:
    """Copies of weights by `convert`, which only reads, each with a mark that shows whether it is still valid."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._copies: dict[int, tuple[Unwritten, Tensor]] = {}  # by weight id

    def find(self, weight: Tensor) -> Tensor | None:
        """Return the copy of a weight, or None. An outdated copy is dropped."""
        entry = self._copies.get(id(weight))
        if entry is None:
            return None
        unwritten, copy = entry
        if unwritten.is_still(weight):
            return copy
        self.forget(id(weight))
        return None

    def make(self, weight: Tensor) -> Tensor | None:
        """Make and keep a copy of a weight. Return None if writes could go undetected.

        Do not call this in an operator, whose arguments count as users of the memory.
        """
        key = id(weight)
        unwritten = marked(weight, lambda _: self.forget(key))
        if unwritten is None:
            return None
        with torch.inference_mode(False), torch.no_grad(), below_autocast():
            copy = self._convert(weight)
        if not unwritten.is_still(weight):  # another thread wrote to it
            return None
        self._copies[key] = unwritten, copy
        return copy

    def forget(self, key: int) -> None:
        """Drop the copy of the weight with this id, if there is one."""
        self._copies.pop(key, None)

    @contextmanager
    def kept(self) -> Iterator[WeightCopies]:
        """Keep the copies until the end of the body, then remove all marks."""
        try:
            yield self
        finally:
            for unwritten, _ in [*self._copies.values()]:
                unwritten.end()
            self._copies.clear()


def _place_of(weight: Tensor) -> tuple[Any, ...]:
    return address_of(weight), weight.storage_offset(), weight.shape, weight.stride(), version(weight)
