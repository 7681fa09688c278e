"""Means of batches: each dtype is summed in itself, but numbers of 16 bits in float32, and rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nano_loop.patching.torch_private import foreach_divide, foreach_multiply


def is_summed_wider(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype are summed in float32 rather than in themselves."""
    return dtype in (torch.bfloat16, torch.float16)


def wide_mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors, summed in their order, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    divide(total, len(parts))
    return total


def divide(total: torch.Tensor, count: int) -> None:
    """Divide in place, rounding as a division does; by a power of two that is an exact, and faster, product."""
    if _is_power_of_two(count):
        total.mul_(1 / count)
    else:
        total.div_(count)


def divide_each(totals: list[torch.Tensor], count: int) -> None:
    """Divide each of a list in place, as `divide` does."""
    if _is_power_of_two(count):
        foreach_multiply(totals, 1 / count)
    else:
        foreach_divide(totals, count)


def _is_power_of_two(count: int) -> bool:
    return math.frexp(count)[0] == 0.5
