"""Convolutions of fp32 images in NHWC by AMX (``convolution.c``), whose products round to bf16 without extra casts.

The input gradient of a convolution is computed as well, as a convolution of the output gradient with the flipped
kernel, unless the kernel has several positions and a stride.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.convolution.weight_gradient import DIMENSIONS, FARTHEST, ConvolutionCall, Geometry
from nano_loop.kernels.memory import BYTES, FP32, STRIDED, empty

_STRIDED = FP32._replace(layout=STRIDED)
KERNEL = CompiledKernel(
    "convolution", {"convolution": (_STRIDED, _STRIDED, FP32, _STRIDED, BYTES)}, needs_avx512_bf16=True
)
#: Minimum number of input and output channels: with fewer, most of a tile is empty.
_FEWEST = 16
#: Maximum stride of a weight: the offsets of 16 outputs are 32-bit integers.
_FARTHEST_OUTPUT = 1 << 27

_INT = ctypes.c_int64


class _Call(ConvolutionCall):
    _fields_ = (("input", _INT * 3), ("out", _INT * 3), ("weight", _INT * 4))


def supports(inputs: Tensor, weight: Tensor, geometry: Geometry, out_sizes: Sequence[int]) -> bool:
    """Whether the kernel supports this convolution.

    Parameters
    ----------
    inputs : torch.Tensor
        float32, of shape (N, C, H, W). The channels of a pixel must be contiguous.
    weight : torch.Tensor
        float32, of shape (O, C, *geometry.kernel), with any strides.
    geometry : Geometry
        The kernel size, stride, padding and dilation.
    out_sizes : sequence of int
        Height and width of the result.
    """
    if not KERNEL.uses_amx or inputs.dim() != DIMENSIONS or inputs.stride(1) != 1:
        return False
    if any(tensor.dtype is not torch.float32 for tensor in (inputs, weight)) or any(
        len(pair) != 2 for pair in geometry
    ):
        return False
    if min(weight.shape[:2]) < _FEWEST or max(weight.stride()) > _FARTHEST_OUTPUT:
        return False
    if not inputs.numel() or min(*out_sizes, *geometry.padding) < 0 or not min(out_sizes):
        return False
    if max(*geometry.stride, *geometry.padding, *geometry.dilation) > FARTHEST:
        return False
    return KERNEL.bytes_of(_call(inputs, weight, geometry, out_sizes), torch.get_num_threads()) <= SCRATCH_BOUND


def convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, out_sizes: Sequence[int]
) -> Tensor:
    """Compute a convolution that `supports` accepts, with inputs and weight rounded to bfloat16.

    Returns
    -------
    torch.Tensor
        float32, of shape (N, O, *out_sizes), in channels_last.
    """
    out = empty(inputs.size(0), weight.size(0), *out_sizes, layout=torch.channels_last)
    _compute(_call(inputs, weight, geometry, out_sizes), inputs, weight, bias, out)
    return out


def supports_gradient(gradient: Tensor, weight: Tensor, geometry: Geometry, in_sizes: Sequence[int]) -> bool:
    """Whether the kernel supports the input gradient of a convolution; see `input_gradient`."""
    if gradient.dim() != DIMENSIONS or any(len(pair) != 2 for pair in geometry):
        return False
    has_one_position = max(*geometry.kernel, *(p + 1 for p in geometry.padding)) == 1
    if max(geometry.stride) > 1 and not has_one_position:
        return False
    return supports(gradient, weight.transpose(0, 1), _turned(geometry), in_sizes)


def input_gradient(gradient: Tensor, weight: Tensor, geometry: Geometry, in_sizes: Sequence[int]) -> Tensor:
    """Compute the input gradient of a convolution that `supports_gradient` accepts, with factors rounded to bfloat16.

    Parameters
    ----------
    gradient : torch.Tensor
        The output gradient, laid out like the inputs of `supports`.
    weight, geometry : torch.Tensor, Geometry
        The weight and geometry of the convolution.
    in_sizes : sequence of int
        Height and width of the convolution's inputs.
    """
    exchanged, has_stride = weight.transpose(0, 1), max(geometry.stride) > 1
    call = _call(gradient, exchanged, _turned(geometry), gradient.shape[2:] if has_stride else in_sizes)
    output, channel, row, column = exchanged.stride()
    call.weight = output, channel, -row, -column  # in reverse order
    out = empty(call.images, call.outputs, *in_sizes, layout=torch.channels_last)
    reached = out.zero_()[:, :, :: geometry.stride[0], :: geometry.stride[1]] if has_stride else out
    _compute(call, gradient, exchanged[:, :, -1:, -1:], None, reached)
    return out


def _turned(geometry: Geometry) -> Geometry:
    """Return the geometry of the convolution that computes the input gradient of a convolution without a stride."""
    padding = [d * (k - 1) - p for k, p, d in zip(geometry.kernel, geometry.padding, geometry.dilation, strict=True)]
    return geometry._replace(padding=padding, stride=(1, 1))


def _compute(call: _Call, inputs: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    image, _, row, column = out.stride()
    call.out = image, row, column
    memory = scratch(KERNEL.bytes_of(call, torch.get_num_threads()))
    KERNEL("convolution", call, inputs, weight, bias, out, memory)


def _call(inputs: Tensor, weight: Tensor, geometry: Geometry, out_sizes: Sequence[int]) -> _Call:
    call = _Call.of(inputs, weight.size(0), out_sizes, geometry)
    image, _, row, column = inputs.stride()
    call.input, call.weight = (image, row, column), weight.stride()
    return call
