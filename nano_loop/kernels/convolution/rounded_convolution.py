"""Convolutions of fp32 whose products round their inputs, by casts around torch's bf16 kernels.

oneDNN also rounds the sums to bf16. Biases and their gradients are accumulated in fp32. Images round to bf16 only in
NHWC: in NCHW, oneDNN is slower in bf16 than in fp32. Sequences (1-D) round in any layout. All tensors round to fp16,
for torch's fp32 kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import narrow_copies, override
from nano_loop.kernels.memory import NHWC, is_plain
from nano_loop.kernels.override import ROUNDED, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.policy.product_precision import CONVOLUTION

_SEQUENCES = 3  # dimensions of a 1-D convolution's input


def _supports(kernel: Kernel, inputs: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Call | None:
    if inputs.dtype is not torch.float32:
        return None
    multiplications = inputs.size(0) * math.prod(_places(inputs, weight, geometry)) * weight.numel()
    return Call(CONVOLUTION, (inputs, weight, bias), geometry, kernel, multiplications)


def _places(inputs: Tensor, weight: Tensor, geometry: Sequence[Any]) -> Sequence[int]:
    """Return the number of kernel positions in an image by dimension; each is multiplied with the whole weight."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed:
        return inputs.shape[2:]
    places = zip(inputs.shape[2:], weight.shape[2:], padding, dilation, stride, strict=False)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in places]


def _rounded(call: Call) -> Tensor:
    inputs, weight, bias = call.tensors
    assert call.kernel is not None
    out: Tensor = call.kernel(narrow_copies.rounded(inputs), weight.bfloat16(), None, *call.numbers)
    if bias is None:
        return narrow_copies.widened(out)
    return out.float().add_(bias.view(-1, *[1] * (out.dim() - 2)))


def can_round(call: Call, first: int, groups: int) -> bool:
    """Whether rounding the tensors of a convolution to bf16, starting with index `first`, can make it faster."""
    inputs, weight = call.tensors[first : first + 2]
    input_dtypes = (*override.FP32, *override.BF16) if first else override.FP32  # a backward may get a bf16 copy
    if groups != 1 or not is_plain(inputs, input_dtypes) or not is_plain(weight, override.FP32):
        return False
    if inputs.dim() == _SEQUENCES:
        return True
    layout = NHWC.get(inputs.dim())
    return layout is not None and not inputs.is_contiguous() and inputs.is_contiguous(memory_format=layout)


OVERRIDES = (
    Override(
        "convolution",
        (
            Algorithm(
                ROUNDED,
                _rounded,
                override.FP32,
                is_exact=False,
                supports=lambda call: can_round(call, 0, call.numbers[-1]),
            ),
        ),
        _supports,
        product=CONVOLUTION,
        factors=2,
        keeps_rounded=True,
    ),
    narrow_copies.keeping("convolution", {0: "input"}, "convolution_backward"),
)
