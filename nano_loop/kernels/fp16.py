"""Rounds tensors to fp16's numbers, for models whose policy says so. Their product itself is in fp32."""

from __future__ import annotations

import math

from torch import Tensor

#: The largest exponent of a factor that is no denormal number in fp32, and neither is one divided by it.
_MOST = 126


def to_fp16s_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 whose numbers are those of fp16, times the power of two of the largest finite one.

    So none overflows, and small gradients are not zero: those are that are 2⁻²⁵ of the largest, or less.
    """
    largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    factor = 2.0 ** min(max(exponent, -_MOST), _MOST)
    return tensor.mul(1 / factor).half().float().mul_(factor)
