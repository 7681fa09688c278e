"""The gradient of a convolution's weight by a C function (``weight_gradient.c``), for bf16 images in NHWC.

oneDNN's kernel transposes each image first, and computes at half to three quarters of the rate of its forward. This one
pairs two images pixel by pixel while it packs them, and comes near that rate. It needs a CPU with AVX-512's bf16
instructions.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.memory import BF16, BYTES, STRIDED, empty

_BF16 = BF16._replace(layout=STRIDED)
KERNEL = CompiledKernel("weight_gradient", {"weight_gradient": (_BF16, _BF16, _BF16, BYTES)}, needs_avx512_bf16=True)
#: Minimum number of channels and of outputs: with fewer, most of a vector is empty.
_FEWEST = 8
#: Maximum number of pixels that a step of the geometry may reach: with more, bytes would overflow.
_FARTHEST = 1 << 12
#: Maximum number of positions of a kernel whose gradient is written in NCHW: `MOST_POSITIONS` of the C file.
_MOST_POSITIONS = 25
_DIMENSIONS = 4  # images, channels, rows, columns

_INT = ctypes.c_int64
_SIZES = ("images", "channels", "outputs", "rows", "columns", "out_rows", "out_columns")


class Geometry(NamedTuple):
    """Height and width of a kernel, and how it moves, as in `torch.nn.Conv2d`: two int each."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = (
        *((name, _INT) for name in _SIZES),
        *((name, _INT * 2) for name in Geometry._fields),
        *((name, _INT * 3) for name in ("input", "gradient")),
        ("result", _INT * 4),
    )


def supports(gradient: Tensor, inputs: Tensor, geometry: Geometry) -> bool:
    """Whether the kernel supports these arguments of `weight_gradient`."""
    if gradient.dim() != _DIMENSIONS or any(len(pair) != 2 for pair in geometry):
        return False
    if any(tensor.size(1) < _FEWEST or tensor.stride(1) != 1 for tensor in (gradient, inputs)):
        return False
    if gradient.size(0) != inputs.size(0) or not (gradient.numel() and inputs.numel()):
        return False
    if max(map(abs, (*geometry.stride, *geometry.padding, *geometry.dilation))) > _FARTHEST or KERNEL.unavailable:
        return False
    return _bytes(_call(gradient, inputs, geometry)) <= SCRATCH_BOUND


def weight_gradient(gradient: Tensor, inputs: Tensor, geometry: Geometry, in_nchw: bool = False) -> Tensor:
    """Compute the gradient of the weight of a convolution without groups.

    Parameters
    ----------
    gradient : torch.Tensor
        bfloat16, of shape (N, O, H', W'): the gradient of the output.
    inputs : torch.Tensor
        bfloat16, of shape (N, C, H, W). `supports` accepts both: the channels of a pixel lie side by side.
    geometry : Geometry
        Of the convolution.
    in_nchw : bool
        Whether the result is wanted in the layout of weights in NCHW, which autograd would copy it to. Kernels of more
        than 25 positions are in channels_last all the same.

    Returns
    -------
    torch.Tensor
        bfloat16, of shape (O, C, *kernel), in channels_last or contiguous. Sums are in fp32. Their order depends on the
        number of threads.
    """
    sizes, positions = (gradient.size(1), inputs.size(1), *geometry.kernel), math.prod(geometry.kernel)
    form = torch.contiguous_format if in_nchw and 1 < positions <= _MOST_POSITIONS else torch.channels_last
    result = empty(*sizes, dtype=torch.bfloat16, layout=form)
    call = _call(gradient, inputs, geometry)
    call.result = (_INT * 4)(*result.stride())
    KERNEL("weight_gradient", call, inputs, gradient, result, scratch(_bytes(call)))
    return result


def _call(gradient: Tensor, inputs: Tensor, geometry: Geometry) -> _Call:
    images, outputs, *of_out = gradient.shape
    call = _Call(images, inputs.size(1), outputs, *inputs.shape[2:], *of_out)
    for name, pair in zip(Geometry._fields, geometry, strict=True):
        setattr(call, name, (_INT * 2)(*pair))
    for name, tensor in (("input", inputs), ("gradient", gradient)):
        image, _, row, column = tensor.stride()
        setattr(call, name, (_INT * 3)(image, row, column))
    return call


def _bytes(call: _Call) -> int:
    return KERNEL.bytes_of(call, torch.get_num_threads())
