"""Gradients of depthwise convolutions of images in NHWC by C functions (``depthwise.c``), in bf16 or fp32.

Each channel has its own kernel, so there is little arithmetic, and the functions are memory-bound. oneDNN's functions
take up to 13 times as long in bf16.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.convolution.weight_gradient import ConvolutionCall, Geometry
from nano_loop.kernels.memory import FLOATS, FP32, empty

_PIXELS = FLOATS._replace(layout="strided")  # `supports` has checked the memory format
KERNEL = CompiledKernel(
    "depthwise", {"input_gradient": (_PIXELS, FP32, _PIXELS), "weight_gradient": (_PIXELS, _PIXELS, FP32)}
)
#: Minimum number of channels: one vector.
_FEWEST = 16
#: Kernel widths for weight gradients, and the maximum number of positions, `POSITIONS` of the C file.
_WIDTHS, _MOST_POSITIONS = (3, 5, 7), 64
#: Minimum number of output elements. Below it, the Python overhead exceeds the gain.
MIN_ELEMENTS = 1 << 14
_DIMENSIONS = 4


class _Call(ConvolutionCall):
    _fields_ = (("bf16", ctypes.c_int64),)


def supports(gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> bool:
    """Whether the gradients of a convolution that is not transposed are computed here."""
    if gradient.dim() != _DIMENSIONS or any(len(pair) != 2 for pair in geometry) or weight.size(1) != 1:
        return False
    if not groups == weight.size(0) == inputs.size(1) >= _FEWEST or gradient.numel() < MIN_ELEMENTS:
        return False
    if geometry.kernel[1] not in _WIDTHS or math.prod(geometry.kernel) > _MOST_POSITIONS or min(geometry.padding) < 0:
        return False
    if not gradient.dtype is inputs.dtype is weight.dtype or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    return inputs.is_contiguous(memory_format=torch.channels_last) and KERNEL.unavailable is None


def input_gradient(gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Return the input gradient in NHWC, in the inputs' dtype, or None without memory; inputs are not read."""
    by_position = weight.float().flatten(1).t().contiguous()
    out, gradient = torch.empty_like(inputs), gradient.contiguous(memory_format=torch.channels_last)
    is_done = KERNEL("input_gradient", _call(gradient, inputs, geometry), gradient, by_position, out)
    return out if is_done else None


def weight_gradient(gradient: Tensor, inputs: Tensor, geometry: Geometry) -> Tensor | None:
    """Return the weight gradient in fp32, of shape (C, 1, height, width), or None if memory cannot be allocated."""
    channels, gradient = inputs.size(1), gradient.contiguous(memory_format=torch.channels_last)
    out = empty(math.prod(geometry.kernel), channels)
    if not KERNEL("weight_gradient", _call(gradient, inputs, geometry), gradient, inputs, out):
        return None
    return out.t().reshape(channels, 1, *geometry.kernel)


def _call(gradient: Tensor, inputs: Tensor, geometry: Geometry) -> _Call:
    call = _Call.of(inputs, inputs.size(1), gradient.shape[2:], geometry)
    call.bf16 = inputs.dtype is torch.bfloat16
    return call
