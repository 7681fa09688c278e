"""What of a tensor's sizes and strides a choice depends on, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Maximum number of elements of a tensor whose computation is measured: the ways take memory several times its size.
MOST_ELEMENTS = 1 << 24


def bucket(count: int) -> str:
    """Return a text that is equal for counts of about the same size: within a factor of two."""
    return f"2^{max(count - 1, 0).bit_length()}"


def layout(tensor: Tensor) -> str:
    """Return the memory layout: contiguous, channels last, or neither."""
    if tensor.is_contiguous():
        return "C"
    is_last = tensor.dim() in (3, 4, 5) and tensor.movedim(1, -1).is_contiguous()
    return "L" if is_last else "S"


def most_elements(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of the largest tensor."""
    return max(tensor.numel() for tensor in tensors)


def rough(shape: torch.Size) -> str:
    """Return sizes of which the first one, which may be that of a batch, is rough."""
    return "x".join([*(bucket(size) for size in shape[:1]), *map(str, shape[1:])])


def joined(*values: object) -> str:
    """Return the words of a key in one text."""
    return " ".join(map(str, values)).rstrip()
