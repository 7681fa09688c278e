"""The weight gradient of a convolution by a C function (``weight_gradient.c``), for images in NHWC.

oneDNN's kernel transposes each image first, and reaches half to three quarters of the rate of its forward. This
function pairs two images pixel by pixel while packing them, and comes close to that rate. It requires the bf16
instructions of AVX-512, and uses AMX tiles if available. fp32 values are rounded while they are packed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.memory import BYTES, FLOATS, STRIDED, empty

_NUMBERS = FLOATS._replace(layout=STRIDED)
KERNEL = CompiledKernel("weight_gradient", {"weight_gradient": (*[_NUMBERS] * 3, BYTES)}, needs_avx512_bf16=True)
#: Minimum number of input and output channels: with fewer, most of a vector is empty. If there are fewer channels, the
#: pixels under a row of the kernel, which are contiguous, count as one pixel with more channels.
FEWEST = 8
#: Maximum number of pixels per step of the geometry: with more, byte offsets would overflow.
FARTHEST = 1 << 12
#: Maximum number of positions of a kernel whose gradient is written in NCHW: `MOST_POSITIONS` of the C file.
_MOST_POSITIONS = 25
DIMENSIONS = 4  # images, channels, rows, columns

_INT = ctypes.c_int64


class Geometry(NamedTuple):
    """Kernel size, stride, padding and dilation as in `torch.nn.Conv2d`, as pairs of (height, width)."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


class ConvolutionCall(ctypes.Structure):
    """The beginning of `Call` of the C files for convolutions."""

    _fields_ = (
        *((name, _INT) for name in ("images", "channels", "outputs", "rows", "columns", "out_rows", "out_columns")),
        *((name, _INT * 2) for name in Geometry._fields),
    )

    @classmethod
    def of(cls, inputs: Tensor, outputs: int, out_sizes: Sequence[int], geometry: Geometry) -> Self:
        """Return the sizes of a convolution of images with this number of outputs and these output sizes."""
        images, channels, *sizes = inputs.shape
        return cls(images, channels, outputs, *sizes, *out_sizes, *map(tuple, geometry))


class _Call(ConvolutionCall):
    _fields_ = (
        *((name, _INT * 3) for name in ("input", "gradient")),
        ("result", _INT * 4),
        *((name, _INT) for name in ("input_is_wide", "gradient_is_wide", "is_wide", "by_tiles")),
    )


def supports(gradient: Tensor, inputs: Tensor, geometry: Geometry) -> bool:
    """Whether the kernel supports these arguments of `weight_gradient`."""
    if gradient.dim() != DIMENSIONS or any(len(pair) != 2 for pair in geometry):
        return False
    few, width = inputs.size(1) < FEWEST, geometry.kernel[1]
    if few and (inputs.stride(3) != inputs.size(1) or geometry.dilation[1] != 1 or inputs.size(1) * width < FEWEST):
        return False
    if gradient.size(1) < FEWEST or any(t.size(1) > 1 and t.stride(1) != 1 for t in (gradient, inputs)):
        return False
    if gradient.size(0) != inputs.size(0) or not (gradient.numel() and inputs.numel()):
        return False
    if max(map(abs, (*geometry.stride, *geometry.padding, *geometry.dilation))) > FARTHEST or KERNEL.unavailable:
        return False
    return _bytes(_call(gradient, inputs, geometry)) <= SCRATCH_BOUND


def weight_gradient(gradient: Tensor, inputs: Tensor, geometry: Geometry, in_nchw: bool = False) -> Tensor:
    """Compute the weight gradient of a convolution without groups, of bf16 or fp32 that `supports` accepts.

    With `in_nchw`, it has the layout of an NCHW weight, to which autograd would copy it, if it is bf16 with eight
    channels or more and at most 25 positions; otherwise it is in channels_last. Sums are accumulated in fp32 in an
    order that depends on the number of threads.
    """
    sizes, positions = (gradient.size(1), inputs.size(1), *geometry.kernel), math.prod(geometry.kernel)
    dtype = torch.promote_types(gradient.dtype, inputs.dtype)
    turns = in_nchw and 1 < positions <= _MOST_POSITIONS and dtype is torch.bfloat16 and inputs.size(1) >= FEWEST
    result = empty(*sizes, dtype=dtype, layout=torch.contiguous_format if turns else torch.channels_last)
    if inputs.size(1) < FEWEST and geometry.padding[1]:
        columns = (0, 0, geometry.padding[1], geometry.padding[1])
        inputs = F.pad(inputs.permute(0, 2, 3, 1), columns).permute(0, 3, 1, 2)
    call = _call(gradient, inputs, geometry)
    call.result, call.is_wide = result.stride(), dtype is torch.float32
    KERNEL("weight_gradient", call, inputs, gradient, result, scratch(_bytes(call)))
    return result


def _call(gradient: Tensor, inputs: Tensor, geometry: Geometry) -> _Call:
    call = _Call.of(inputs, gradient.size(1), gradient.shape[2:], geometry)
    for name, tensor in (("input", inputs), ("gradient", gradient)):
        image, _, row, column = tensor.stride()
        setattr(call, name, (image, row, column))
    call.input_is_wide, call.gradient_is_wide = (tensor.dtype is torch.float32 for tensor in (inputs, gradient))
    call.by_tiles = KERNEL.uses_amx
    if inputs.size(1) < FEWEST:  # the padded inputs under a row of the kernel count as one pixel
        call.channels, call.columns = inputs.size(1) * geometry.kernel[1], call.out_columns
        call.input[2] *= geometry.stride[1]
        call.kernel[1] = call.stride[1] = 1
        call.padding[1] = 0
    return call


def _bytes(call: _Call) -> int:
    return KERNEL.bytes_of(call, torch.get_num_threads())
