"""Convolutions of fp32 images whose products round their inputs: casts around torch's kernels for bf16.

oneDNN rounds the sums to bf16, too. Biases and their gradients are added up in fp32. Only images in NHWC are rounded:
in NCHW, oneDNN is slower in bf16 than in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.replacement import Replacement
from nano_loop.kernels.rounding import CONVOLUTION, is_large, note, rounds_products

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
        if not rounds_inputs(inputs, weight, _output_pixels(inputs, weight, geometry), geometry[-1]):
            out: Tensor = original(keys, inputs, weight, bias, *geometry)
            return out
        out = original(keys, inputs.bfloat16(), weight.bfloat16(), None, *geometry).float()
        return out if bias is None else out.add_(bias.view(-1, *[1] * (out.dim() - 2)))

    return dispatched


REPLACEMENTS = (Replacement("convolution", for_set_up_models),)


def rounds_inputs(inputs: Tensor, weight: Tensor, pixels: int, groups: int) -> bool:
    """Whether a convolution rounds its inputs, whose whole weight is multiplied with so many pixels."""
    multiplications = pixels * weight.numel()
    if groups != 1 or not is_large(CONVOLUTION, multiplications) or not rounds_products():
        return False
    if any(
        type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype is not torch.float32 or tensor.is_mkldnn
        for tensor in (inputs, weight)
    ):
        return False
    layout = _LAYOUTS.get(inputs.dim())
    if layout is None or inputs.is_contiguous() or not inputs.is_contiguous(memory_format=layout):
        return False
    note(CONVOLUTION, multiplications)
    return True


def _output_pixels(inputs: Tensor, weight: Tensor, geometry: Sequence[Any]) -> int:
    """Return how many pixels are multiplied with the whole weight."""
    (stride, padding, dilation, transposed, *_), sizes = geometry, inputs.shape[2:]
    if not transposed:
        places = zip(sizes, weight.shape[2:], padding, dilation, stride, strict=False)
        sizes = torch.Size((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in places)
    return inputs.size(0) * math.prod(sizes)
