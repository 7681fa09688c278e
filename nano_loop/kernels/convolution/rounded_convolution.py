"""Convolutions of fp32 images whose products round their inputs: by AMX, or casts around torch's kernels for bf16.

oneDNN rounds the sums to bf16, too. Biases and their gradients are added up in fp32. Only images in NHWC are rounded to
bf16: in NCHW, oneDNN is slower in bf16 than in fp32. To fp16's numbers, all are, and torch's kernel for fp32 computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.convolution import blocked_convolution
from nano_loop.kernels.convolution.weight_gradient import DIMENSIONS, Geometry
from nano_loop.kernels.fp16 import in_fp16
from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.kernels.replacement import Arguments, Replacement
from nano_loop.policy.policy import CONVOLUTION
from nano_loop.policy.products import dtype_of, rounds

#: Layouts with the channels of a pixel side by side, by the number of dimensions.
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def for_set_up_models(original: Callable[..., Any] | None) -> Callable[..., Tensor]:
    """Return the replacement of the CPU kernel of ``aten::convolution``.

    Parameters
    ----------
    original : callable
        The original kernel. None is not supported.
    """
    assert original is not None

    def dispatched(
        keys: torch.DispatchKeySet, inputs: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        def in_fp32(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out: Tensor = original(keys, inputs, weight, bias, *geometry)
            return out

        def rounded(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            blocked = attempt(_in_blocks, inputs, weight, bias, geometry)
            if blocked is not None:
                return blocked
            out: Tensor = original(keys, inputs.bfloat16(), weight.bfloat16(), None, *geometry).float()
            return out if bias is None else out.add_(bias.view(-1, *[1] * (out.dim() - 2)))

        multiplications = inputs.size(0) * math.prod(_places(inputs, weight, geometry)) * weight.numel()
        factors = in_fp16(CONVOLUTION, multiplications, inputs, weight)
        if factors is not None:
            return in_fp32(factors[0], factors[1], bias)
        call = Arguments(CONVOLUTION, (inputs, weight, bias), geometry)
        is_rounded = may_be_rounded(inputs, weight, multiplications, geometry[-1]) and rounds(
            CONVOLUTION, multiplications, call, in_fp32, rounded
        )
        return (rounded if is_rounded else in_fp32)(inputs, weight, bias)

    return dispatched


REPLACEMENTS = (Replacement("convolution", for_set_up_models),)


def may_be_rounded(inputs: Tensor, weight: Tensor, multiplications: int, groups: int) -> bool:
    """Whether a convolution, or its gradients, may round these to bf16."""
    if groups != 1 or dtype_of(CONVOLUTION, multiplications) is not torch.bfloat16:
        return False
    if not all(is_plain(tensor, (torch.float32,)) for tensor in (inputs, weight)):
        return False
    layout = _LAYOUTS.get(inputs.dim())
    return layout is not None and not inputs.is_contiguous() and inputs.is_contiguous(memory_format=layout)


def _in_blocks(inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence[Any]) -> Tensor | None:
    """Return the convolution by AMX, or None where it cannot compute it."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed or inputs.dim() != DIMENSIONS:
        return None
    blocks, sizes = Geometry(weight.shape[2:], stride, padding, dilation), _places(inputs, weight, geometry)
    if not blocked_convolution.supports(inputs, weight, blocks, sizes):
        return None
    return blocked_convolution.convolution(inputs, weight, bias, blocks, sizes)


def _places(inputs: Tensor, weight: Tensor, geometry: Sequence[Any]) -> Sequence[int]:
    """Return how many places the kernel has in an image, by dimension: each is multiplied with the whole weight."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed:
        return inputs.shape[2:]
    places = zip(inputs.shape[2:], weight.shape[2:], padding, dilation, stride, strict=False)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in places]
