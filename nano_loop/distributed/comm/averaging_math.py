"""Means of batches: each dtype is summed in itself, but numbers of 16 bits in float32, and rounded once."""

from __future__ import annotations

import math

import torch


def is_summed_wider(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype are summed in float32 rather than in themselves."""
    return dtype in (torch.bfloat16, torch.float16)


def divide(total: torch.Tensor, count: int) -> None:
    """Divide in place, rounding as a division does; by a power of two that is an exact, and faster, product."""
    if math.frexp(count)[0] == 0.5:
        total.mul_(1 / count)
    else:
        total.div_(count)
