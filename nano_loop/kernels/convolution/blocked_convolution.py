"""Convolutions of fp32 images whose products round their inputs: by AMX, or by casts around torch's bf16 kernels.

The C function (``convolution.c``) rounds images in NHWC to bf16 without extra casts. It also computes the input
gradient of a convolution, as a convolution of the output gradient with the flipped kernel, unless the kernel has
several positions and a stride.

oneDNN also rounds the sums to bf16. Biases and their gradients are accumulated in fp32. Images round to bf16 only in
NHWC: in NCHW, oneDNN is slower in bf16 than in fp32. Sequences (1-D) round in any layout. All tensors round to fp16,
for torch's fp32 kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import narrow_copies, override
from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.convolution.weight_gradient import DIMENSIONS, FARTHEST, ConvolutionCall, Geometry
from nano_loop.kernels.memory import BYTES, FP32, NHWC, STRIDED, attempt, empty, is_plain
from nano_loop.kernels.override import ROUNDED, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.policy.product_precision import CONVOLUTION

_STRIDED = FP32._replace(layout=STRIDED)
KERNEL = CompiledKernel(
    "convolution", {"convolution": (_STRIDED, _STRIDED, FP32, _STRIDED, BYTES)}, needs_avx512_bf16=True
)
#: Minimum number of input and output channels: with fewer, most of a tile is empty.
_FEWEST = 16
#: Maximum stride of a weight: the offsets of 16 outputs are 32-bit integers.
_FARTHEST_OUTPUT = 1 << 27
_SEQUENCES = 3  # dimensions of a 1-D convolution's input

_INT = ctypes.c_int64


class _Call(ConvolutionCall):
    _fields_ = (("input", _INT * 3), ("out", _INT * 3), ("weight", _INT * 4))


def supports(inputs: Tensor, weight: Tensor, geometry: Geometry, out_sizes: Sequence[int]) -> bool:
    """Whether the kernel supports a convolution of fp32 images, whose pixels' channels must be contiguous."""
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
    """Compute a convolution that `supports` accepts, with factors rounded to bfloat16, in fp32 and channels_last."""
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
    """Compute the input gradient of a convolution that `supports_gradient` accepts, with factors rounded to bf16."""
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
    out: Tensor = call.kernel(narrow_copies.rounded(inputs), weight.bfloat16(), None, *call.numbers)
    if bias is None:
        return narrow_copies.widened(out)
    return out.float().add_(bias.view(-1, *[1] * (out.dim() - 2)))


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


def _in_blocks(inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence[Any]) -> Tensor | None:
    """Return the convolution by AMX, or None if it is not supported."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed or inputs.dim() != DIMENSIONS:
        return None
    blocks, sizes = Geometry(weight.shape[2:], stride, padding, dilation), _places(inputs, weight, geometry)
    if not supports(inputs, weight, blocks, sizes):
        return None
    return convolution(inputs, weight, bias, blocks, sizes)


def _places(inputs: Tensor, weight: Tensor, geometry: Sequence[Any]) -> Sequence[int]:
    """Return the number of kernel positions in an image by dimension; each is multiplied with the whole weight."""
    stride, padding, dilation, transposed, *_ = geometry
    if transposed:
        return inputs.shape[2:]
    places = zip(inputs.shape[2:], weight.shape[2:], padding, dilation, stride, strict=False)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in places]
