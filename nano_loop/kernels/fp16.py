"""Rounds the inputs of products of fp32 tensors to fp16's numbers, for models whose policy says so."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nano_loop.kernels.memory import is_plain
from nano_loop.policy.products import dtype_of, note

#: The largest exponent of a factor that is no denormal number in fp32, and neither is one divided by it.
_MOST = 126


def in_fp16(kind: str, multiplications: int, *tensors: Tensor) -> list[Tensor] | None:
    """Return the inputs of a product that rounds them to fp16's numbers, and note it for the policy; None for others.

    The product itself is in fp32, so no sum overflows that does not in fp32.
    """
    if dtype_of(kind, multiplications) is not torch.float16:
        return None
    if not all(is_plain(tensor, (torch.float32,)) for tensor in tensors):
        return None
    note(kind, multiplications)
    return [_to_fp16s_numbers(tensor) for tensor in tensors]


def _to_fp16s_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 whose numbers are those of fp16, times the power of two of the largest finite one.

    So none overflows, and small gradients are not zero: those are that are 2⁻²⁵ of the largest, or less.
    """
    largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    factor = 2.0 ** min(max(exponent, -_MOST), _MOST)
    return tensor.mul(1 / factor).half().float().mul_(factor)
