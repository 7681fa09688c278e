"""Means of batches, summed in their own dtype, except that 16-bit values are summed in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def is_summed_wider(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype are summed in float32 rather than in their own dtype."""
    return dtype in (torch.bfloat16, torch.float16)


def divide(total: torch.Tensor, count: int) -> None:
    """Divide in place with correct rounding; a power of two becomes an exact and faster multiplication."""
    if math.frexp(count)[0] == 0.5:
        total.mul_(1 / count)
    else:
        total.div_(count)


def set_to_mean(mean: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Set `mean` to the mean of `rows`, with the same bits on each rank, unlike `torch.sum`, whose order varies."""
    first, second, *others = rows
    is_wide = is_summed_wider(mean.dtype)
    total = torch.add(first.float(), second) if is_wide else torch.add(first, second, out=mean)
    for row in others:
        total.add_(row)
    divide(total, len(rows))
    if is_wide:
        mean.copy_(total)
