"""Copies of weights, such as rounded ones, each of which lasts until something may have written to the weight.

torch can mark memory as what is to be copied before it is written to. Here nobody else has it, so that nothing is ever
copied: whoever asks for the address to write only takes the mark away. Operators in place do so, also through ``.data``
or from another thread, and so do numpy, DLPack, other libraries, and this package's functions in C. None of them has to
be known, and no attribute is replaced. What only reads leaves the mark, except for a few that ask as if they wrote: the
copy is then made again.

An address that was taken before the copy was made is not asked for again. So there is no copy while anybody else has
the memory, as an array does. Memory of others takes no mark: that of a mapped file, of numpy, or shared with other
processes. What remains unseen is an address that a program keeps as a number.
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
    """What a weight was when it was marked.

    Attributes
    ----------
    memory : weakref.ref
        Its storage. The weight is not held, not even weakly: `torch.utils.swap_tensors` refuses that.
    place : tuple
        Where in the memory it lies, and its version.
    """

    memory: weakref.ref[torch.UntypedStorage]
    place: tuple[Any, ...]

    def is_still(self, weight: Tensor) -> bool:
        """Whether a weight is this one, and nobody may have written to it since."""
        return is_unwritten(weight) and _place_of(weight) == self.place

    def end(self) -> None:
        """Take the mark away, which copies nothing."""
        storage = self.memory()
        if storage is not None:
            storage.data_ptr()


def takes_mark(weight: Tensor) -> bool:
    """Whether the memory of a strided tensor is torch's own, so that a mark tells of writes. It has none afterwards."""
    with torch.no_grad():
        try:
            shared_until_written(weight.detach())
        except RuntimeError:
            return False
    weight.data_ptr()
    return True


def marked(weight: Tensor, freed: Callable[[Any], None] | None = None) -> Unwritten | None:
    """Mark the memory of a weight, or return None where a write might not be seen.

    Parameters
    ----------
    weight : torch.Tensor
        A strided tensor of the CPU.
    freed : callable, optional
        Is called when the memory is freed.
    """
    if not has_lone_storage(weight):
        return None
    with torch.no_grad(), suppress(RuntimeError):  # of memory that is not torch's own
        shared_until_written(weight.detach())
        return Unwritten(weakref.ref(weight.untyped_storage(), freed), _place_of(weight))
    return None


class WeightCopies:
    """Copies of weights, each with the mark that tells whether it is still one.

    Parameters
    ----------
    convert : callable
        Makes a copy of a weight. It may only read it.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._copies: dict[int, tuple[Unwritten, Tensor]] = {}  # by the id of the weight

    def find(self, weight: Tensor) -> Tensor | None:
        """Return the copy of a weight, or None. One that is outdated is forgotten."""
        entry = self._copies.get(id(weight))
        if entry is None:
            return None
        unwritten, copy = entry
        if unwritten.is_still(weight):
            return copy
        self.forget(weight)
        return None

    def make(self, weight: Tensor) -> Tensor | None:
        """Make a copy of a weight, and keep it. Return None where a write might not be seen.

        Not in an operator, whose arguments count as users of the memory.
        """
        key = id(weight)
        unwritten = marked(weight, lambda _: self._forget(key))
        if unwritten is None:
            return None
        with torch.inference_mode(False), torch.no_grad(), below_autocast():
            copy = self._convert(weight)
        if not unwritten.is_still(weight):  # another thread has written to it
            return None
        self._copies[key] = unwritten, copy
        return copy

    def forget(self, weight: Tensor) -> None:
        """Forget the copy of a weight, if there is one."""
        self._forget(id(weight))

    def _forget(self, key: int) -> None:
        self._copies.pop(key, None)

    @contextmanager
    def kept(self) -> Iterator[WeightCopies]:
        """Keep the copies until the end of the body, which leaves no mark."""
        try:
            yield self
        finally:
            for unwritten, _ in [*self._copies.values()]:
                unwritten.end()
            self._copies.clear()


def _place_of(weight: Tensor) -> tuple[Any, ...]:
    return address_of(weight), weight.storage_offset(), weight.shape, weight.stride(), version(weight)
