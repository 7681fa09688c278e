"""Packs lists of tensors into batches of a limited size, each of which is averaged as one.

The packing depends only on the list's shapes and dtypes, so it is the same on every rank and computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nano_loop.patching.torch_private import foreach_copy

#: The shapes and the dtypes of a list's tensors. It is looked up in each step, even for thousands of tensors.
Signature = tuple[tuple[torch.Size, ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True)
class Piece:
    """A tensor or a part of one: its index in the list, its elements (None for all), and its place in the batch."""

    index: int
    bounds: slice | None
    shape: torch.Size
    offset: int

    def between(self, start: int, stop: int) -> Piece | None:
        """Return the part of this piece between two offsets of the batch: the piece itself, a part of it, or None."""
        length = self.shape.numel()
        first, after = max(start, self.offset), min(stop, self.offset + length)
        if after - first == length:
            return self
        if after <= first:
            return None
        shift = (self.bounds.start if self.bounds else 0) - self.offset
        return Piece(self.index, slice(first + shift, after + shift), torch.Size([after - first]), first)


@dataclass
class Batch:
    """Pieces of one dtype that are averaged together; `length` counts elements."""

    dtype: torch.dtype
    length: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def between(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of the elements from `start` to `stop` (exclusive), cut at these bounds."""
        cut = (piece.between(start, stop) for piece in self.pieces)
        return [piece for piece in cut if piece is not None]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the batch."""
        return self.length * self.dtype.itemsize

    def add(self, index: int, shape: torch.Size, bounds: slice | None = None) -> None:
        """Append a piece."""
        self.pieces.append(Piece(index, bounds, shape, self.length))
        self.length += shape.numel()


class Places:
    """Views into flat memory of a batch's dtype, one for each of its pieces."""

    def __init__(self, pieces: Sequence[Piece], memory: torch.Tensor) -> None:
        self.views = [memory[piece.offset : piece.offset + piece.shape.numel()].view(piece.shape) for piece in pieces]
        self._pieces = [(piece.index, piece.bounds) for piece in pieces]

    def copy_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the contiguous tensors of a list to their places."""
        foreach_copy(self.views, self.elements(tensors))

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the contents of the batch back into the tensors of the list."""
        foreach_copy(self.elements(tensors), self.views)

    def elements(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elements of the list's tensors that correspond to the pieces."""
        return [tensors[index] if bounds is None else tensors[index].view(-1)[bounds] for index, bounds in self._pieces]


def signature(tensors: Sequence[torch.Tensor]) -> Signature:
    """Return the shapes and dtypes of `tensors`."""
    return tuple([tensor.shape for tensor in tensors]), tuple([tensor.dtype for tensor in tensors])


def pack(signature: Signature, capacity: int) -> list[Batch]:
    """Pack tensors of the same dtype into batches of at most `capacity` bytes; larger tensors are split."""
    filling: dict[torch.dtype, list[Batch]] = {}
    for index, (shape, dtype) in enumerate(zip(*signature, strict=True)):
        batches = filling.setdefault(dtype, [Batch(dtype)])
        if shape.numel() * dtype.itemsize > capacity:
            _add_parts(batches, index, shape.numel(), capacity // dtype.itemsize)
        elif shape.numel():
            if batches[-1].nbytes + shape.numel() * dtype.itemsize > capacity:
                batches.append(Batch(dtype))
            batches[-1].add(index, shape)
    return [batch for batches in filling.values() for batch in batches if batch.length]


def _add_parts(batches: list[Batch], index: int, length: int, room: int) -> None:
    """Fill the last batch, then add as many batches as needed; `room` is the number of elements per batch."""
    start = 0
    while start < length:
        if batches[-1].length == room:
            batches.append(Batch(batches[-1].dtype))
        part = min(room - batches[-1].length, length - start)
        batches[-1].add(index, torch.Size([part]), slice(start, start + part))
        start += part
