"""Convolutions of fp32 images whose products round their inputs: by AMX, or by casts around torch's bf16 kernels.

oneDNN also rounds the sums to bf16. Biases and their gradients are accumulated in fp32. Only NHWC images are rounded to
bf16: in NCHW, oneDNN is slower in bf16 than in fp32. Images of any layout round to fp16, for torch's fp32 kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.convolution import blocked_convolution
from nano_loop.kernels.convolution.weight_gradient import DIMENSIONS, Geometry
from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.kernels.override import FP32, ROUNDED, Algorithm, Call, Override
from nano_loop.patching.operators.operators import Kernel
from nano_loop.policy.product_precision import CONVOLUTION

#: Layouts in which the channels of a pixel are contiguous, by number of dimensions.
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _supports(kernel: Kernel, inputs: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Call | None:
    if inputs.dtype is not torch.float32:
        return None
    multiplications = inputs.size(0) * math.prod(_places(inputs, weight, geometry)) * weight.numel()
    return Call(CONVOLUTION, (inputs, weight, bias), geometry, kernel, multiplications)


def _rounded(call: Call) -> Tensor:
    inputs, weight, bias = call.tensors
    blocked = attempt(_in_blocks, inputs, weight, bias, call.numbers)
    if blocked is not None:
        return blocked
    assert call.kernel is not None
    out: Tensor = call.kernel(inputs.bfloat16(), weight.bfloat16(), None, *call.numbers).float()
    return out if bias is None else out.add_(bias.view(-1, *[1] * (out.dim() - 2)))


OVERRIDES = (
    Override(
        "convolution",
        (
            Algorithm(
                ROUNDED, _rounded, FP32, is_exact=False, supports=lambda call: can_round(call, 0, call.numbers[-1])
            ),
        ),
        _supports,
        product=CONVOLUTION,
        factors=2,
    ),
)


def can_round(call: Call, first: int, groups: int) -> bool:
    """Whether rounding the tensors of a convolution to bf16, starting with index `first`, can make it faster."""
    inputs, weight = call.tensors[first : first + 2]
    if groups != 1 or not all(is_plain(tensor, FP32) for tensor in (inputs, weight)):
        return False
    layout = _LAYOUTS.get(inputs.dim())
    return layout is not None and not inputs.is_contiguous() and inputs.is_contiguous(memory_format=layout)


def _in_blocks(inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence[Any]) -> Tensor | None:
    """Return the convolution by AMX, or None if it is not supported."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed or inputs.dim() != DIMENSIONS:
        return None
    blocks, sizes = Geometry(weight.shape[2:], stride, padding, dilation), _places(inputs, weight, geometry)
    if not blocked_convolution.supports(inputs, weight, blocks, sizes):
        return None
    return blocked_convolution.convolution(inputs, weight, bias, blocks, sizes)


def _places(inputs: Tensor, weight: Tensor, geometry: Sequence[Any]) -> Sequence[int]:
    """Return the number of kernel positions in an image by dimension; each is multiplied with the whole weight."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed:
        return inputs.shape[2:]
    places = zip(inputs.shape[2:], weight.shape[2:], padding, dilation, stride, strict=False)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in places]
