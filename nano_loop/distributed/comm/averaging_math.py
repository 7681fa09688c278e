"""Means of batches: each dtype is summed in itself, but numbers of 16 bits in float32, and rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nano_loop.patching.torch_private import foreach_divide, foreach_multiply

_SUMMED_WIDER = (torch.bfloat16, torch.float16)


def is_summed_wider(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype are summed in float32 rather than in themselves."""
    return dtype in _SUMMED_WIDER


def real(batch: torch.Tensor) -> torch.Tensor:
    """View complex elements as twice as many real ones, which are summed alike."""
    return torch.view_as_real(batch).view(-1) if batch.is_complex() else batch


def write_mean(out: torch.Tensor, parts: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
    """Write the mean of `parts`, summed in their order, to `out`: flat real tensors of one dtype and length.

    Parameters
    ----------
    out : torch.Tensor
        Overwritten; it shares no memory with the parts.
    parts : sequence of torch.Tensor
        Two or more.
    scratch : torch.Tensor
        What `new_scratch` has made. Elements of 16 bits are summed there and rounded once.
    """
    if is_summed_wider(out.dtype):
        room = scratch.shape[1]
        for start in range(0, len(out), room):
            part = slice(start, start + room)
            out[part].copy_(_wide_mean([tensor[part] for tensor in parts], scratch))
        return
    torch.add(parts[0], parts[1], out=out)
    for addend in parts[2:]:
        out.add_(addend)
    divide(out, len(parts))


def new_scratch() -> torch.Tensor:
    """Make the memory in which `write_mean` widens 16-bit numbers: small, so that it stays in a cache."""
    return torch.empty(2, 1 << 18, dtype=torch.float32, device="cpu")


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


def _wide_mean(parts: Sequence[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
    total, widened = scratch[0, : len(parts[0])], scratch[1, : len(parts[0])]
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(widened.copy_(part))
    divide(total, len(parts))
    return total
