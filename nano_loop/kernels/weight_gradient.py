"""The gradient of a convolution's weight by a C function (``weight_gradient.c``), for bf16 images in NHWC.

oneDNN's kernel transposes each image first, and computes at half to three quarters of the rate of its forward. This one
pairs two images pixel by pixel while it packs them, and comes near that rate. It needs a CPU with AVX-512's bf16
instructions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.kernels.compiled import UnavailableError, compiled_for_threads

#: Maximum number of bytes that all threads together need for packed blocks and sums.
SCRATCH_BOUND = 256 * 2**20
#: Minimum number of channels and of outputs: with fewer, most of a vector is empty.
_FEWEST = 8
#: Maximum number of pixels that a step of the geometry may reach: with more, bytes would overflow.
_FARTHEST = 1 << 12
_DIMENSIONS = 4  # images, channels, rows, columns

_INT = ctypes.c_int64
_SIZES = ("images", "channels", "outputs", "rows", "columns", "out_rows", "out_columns")
_PAIRS = ("kernel", "stride", "padding", "dilation")


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = (
        *((name, _INT) for name in _SIZES),
        *((name, _INT * 2) for name in _PAIRS),
        *((name, _INT * 3) for name in ("input", "gradient", "result")),
    )


@functools.cache
def unavailable() -> str | None:
    """Return why this kernel cannot be used in this process, or None."""
    try:
        supported = compiled_for_threads("weight_gradient").weight_gradient_is_supported()
    except UnavailableError as error:
        return str(error)
    return None if supported else "the CPU has no bf16 instructions of AVX-512"


def is_first_guess() -> bool:
    """Whether it is faster than oneDNN on most shapes: on CPUs without AMX, whose products are faster still."""
    return unavailable() is None and bool(compiled_for_threads("weight_gradient").weight_gradient_is_first_guess())


def fits(
    gradient: Tensor,
    inputs: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether the kernel supports these arguments of `weight_gradient`."""
    if gradient.dim() != _DIMENSIONS or any(len(each) != 2 for each in (stride, padding, dilation)):
        return False
    if any(each.size(1) < _FEWEST or each.stride(1) != 1 for each in (gradient, inputs)):
        return False
    # Without elements, or with a storage that was released, there is no address.
    if gradient.size(0) != inputs.size(0) or not (gradient.data_ptr() and inputs.data_ptr() and gradient.numel()):
        return False
    if max(map(abs, (*stride, *padding, *dilation))) > _FARTHEST or unavailable():
        return False
    call = _call(gradient, inputs, kernel, stride, padding, dilation)
    return _bytes(call, torch.get_num_threads()) <= SCRATCH_BOUND


def weight_gradient(
    gradient: Tensor,
    inputs: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute the gradient of the weight of a convolution without groups.

    Parameters
    ----------
    gradient : torch.Tensor
        bfloat16, of shape (N, O, H', W'): the gradient of the output.
    inputs : torch.Tensor
        bfloat16, of shape (N, C, H, W). `fits` is True of both: the channels of a pixel lie side by side.
    kernel, stride, padding, dilation : sequence of two int
        Height and width of the kernel, and its geometry as in `torch.nn.Conv2d`.

    Returns
    -------
    torch.Tensor
        bfloat16, of shape (O, C, *kernel), in channels_last. Sums are in fp32. Their order depends on the number of
        threads.
    """
    outputs, channels, threads = gradient.size(1), inputs.size(1), torch.get_num_threads()
    result = torch.empty(outputs, *kernel, channels, dtype=torch.bfloat16, device="cpu")
    call = _call(gradient, inputs, kernel, stride, padding, dilation)
    call.result = (_INT * 3)(*result.stride()[:3])
    scratch = torch.empty(_bytes(call, threads), dtype=torch.uint8, device="cpu")
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (inputs, gradient, result, scratch)]
    compiled_for_threads("weight_gradient").weight_gradient(ctypes.byref(call), *pointers, ctypes.c_int(threads))
    return result.permute(0, 3, 1, 2)


def _call(
    gradient: Tensor,
    inputs: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> _Call:
    images, outputs, *of_out = gradient.shape
    call = _Call(images, inputs.size(1), outputs, *inputs.shape[2:], *of_out)
    for name, each in zip(_PAIRS, (kernel, stride, padding, dilation), strict=True):
        setattr(call, name, (_INT * 2)(*each))
    for name, tensor in (("input", inputs), ("gradient", gradient)):
        image, _, row, column = tensor.stride()
        setattr(call, name, (_INT * 3)(image, row, column))
    return call


def _bytes(call: _Call, threads: int) -> int:
    function = compiled_for_threads("weight_gradient").weight_gradient_bytes
    function.restype = _INT
    return int(function(ctypes.byref(call), threads))
