"""Gradients of bf16 convolutions by plain matrix products and sums, or in fp32, where oneDNN's bf16 kernels are slow.

oneDNN computes a weight's gradient image by image. For images with few pixels, and for 1×1 kernels, a single product
over the pixels of all images is faster. For the bias of a transposed convolution, oneDNN's sum takes several times as
long as the rest of the backward. Depthwise convolutions with a stride or a large kernel, and convolutions in many
groups, are up to ten times as fast in fp32, casts included. docs/performance.md has the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.intercept.ownership import belongs_to_set_up_model

#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
WORTH_IT = 1 << 25
#: Maximum number of output pixels, over all images, for which a product was faster with 1×1 kernels.
_PIXELS_OF_1X1 = 1 << 14
#: The same for larger kernels.
_PIXELS = 1 << 11
#: Maximum number of elements of the unfolded input, with one copy per kernel position, for larger kernels: 32 MiB.
_COLUMNS = 1 << 24

#: Minimum number of kernel positions for which a depthwise weight's gradient was faster in fp32, in NHWC and in NCHW.
_POSITIONS, _POSITIONS_IN_NCHW = 25, 49
#: Minimum number of output elements for gradients in fp32. Below it, the Python overhead exceeds the gain.
ELEMENTS_WORTH_IT = 1 << 12
#: Maximum channels of a group, and minimum output elements, for which a weight's gradient was faster in fp32.
_CHANNELS_OF_A_GROUP, _ELEMENTS_OF_GROUPS = 8, 1 << 20
#: Maximum output channels for which the inputs' gradient of a transposed convolution in NCHW was faster in fp32.
_CHANNELS_OF_AN_IMAGE = 3

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def for_set_up_models(original: Callable[..., Any] | None) -> Callable[..., _Gradients]:
    """Return the replacement of the CPU kernel of ``aten::convolution_backward``.

    Backwards that do not belong to a set-up model return torch's own result, bitwise identical.

    Parameters
    ----------
    original : callable
        The original kernel. None is not supported.
    """
    assert original is not None
    faster = faster_backward(original)

    def dispatched(keys: torch.DispatchKeySet, *args: Any) -> _Gradients:
        return faster(keys, *args) if belongs_to_set_up_model() else original(keys, *args)

    return dispatched


def faster_backward(kernel: Callable[..., _Gradients]) -> Callable[..., _Gradients]:
    """Return a function that computes some gradients of convolutions faster than the CPU's kernel.

    Parameters
    ----------
    kernel : callable
        The original kernel, which computes the remaining gradients.

    Returns
    -------
    callable
        Takes the dispatch key set, followed by the arguments of the operator. Returns the gradients of input, weight
        and bias, in their dtypes, and None for each that is not requested. Products and sums are accumulated in fp32,
        as in oneDNN, in a different order.
    """

    def backward(
        keys: torch.DispatchKeySet,
        gradient: Tensor,
        inputs: Tensor,
        weight: Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        output_mask: Sequence[bool],
    ) -> _Gradients:
        ours: list[Tensor | None] = [None, None, None]
        if _is_plain_bf16(gradient, inputs, weight):
            by_product = (
                output_mask[1]
                and not transposed
                and groups == 1
                and _product_is_faster(gradient, inputs, weight, stride, padding, dilation)
            )
            if by_product:
                ours[1] = _of_weight(gradient, inputs, weight, stride, padding, dilation)
            in_fp32 = (
                output_mask[0] and _of_input_is_faster_in_fp32(gradient, weight, stride, transposed, groups),
                output_mask[1] and not transposed and _of_weight_is_faster_in_fp32(gradient, weight, groups),
            )
            # oneDNN computes the weight's gradient again where the bias's is asked for.
            if output_mask[2] and (by_product or transposed or in_fp32[1]):
                ours[2] = gradient.sum([0, *range(2, gradient.dim())])
            if any(in_fp32):
                sizes = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
                found = _in_fp32(kernel, keys, (gradient, inputs, weight), sizes, in_fp32)
                ours = [each if other is None else other for each, other in zip(ours, found, strict=True)]
        left = [asked and found is None for asked, found in zip(output_mask, ours, strict=True)]
        if any(left):
            shape = (stride, padding, dilation, transposed, output_padding, groups)
            theirs = kernel(keys, gradient, inputs, weight, bias_sizes, *shape, left)
            ours = [b if asked else a for a, b, asked in zip(ours, theirs, left, strict=True)]
        return ours[0], ours[1], ours[2]

    return backward


def _is_plain_bf16(*tensors: Tensor) -> bool:
    if any(each.dtype is not torch.bfloat16 or type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
        return False
    # Inside a user's autocast to another dtype, the products would have that dtype.
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is torch.bfloat16


def _of_input_is_faster_in_fp32(
    gradient: Tensor, weight: Tensor, stride: Sequence[int], transposed: bool, groups: int
) -> bool:
    """Whether the inputs' gradient is: of depthwise convolutions with a stride or in NDHWC, and into images."""
    if gradient.numel() < ELEMENTS_WORTH_IT:
        return False
    if transposed:
        return groups == 1 and weight.size(1) <= _CHANNELS_OF_AN_IMAGE and gradient.is_contiguous()
    depthwise = groups == weight.size(0) > 1 and weight.size(1) == 1
    return depthwise and (max(stride) > 1 or (weight.dim() == 5 and not gradient.is_contiguous()))


def _of_weight_is_faster_in_fp32(gradient: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether the weight's gradient is: of large depthwise kernels, and of many groups over large images."""
    if groups == 1 or gradient.numel() < ELEMENTS_WORTH_IT:
        return False
    if weight.size(1) > 1:
        return weight.size(1) <= _CHANNELS_OF_A_GROUP and gradient.numel() >= _ELEMENTS_OF_GROUPS
    return math.prod(weight.shape[2:]) >= (_POSITIONS_IN_NCHW if gradient.is_contiguous() else _POSITIONS)


def _in_fp32(
    kernel: Callable[..., _Gradients],
    keys: torch.DispatchKeySet,
    tensors: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[Any, ...],
    asked: tuple[bool, bool],
) -> _Gradients:
    """Return the gradients of inputs and weight that are asked for, computed in fp32."""
    gradient, inputs, weight = tensors
    # The inputs' gradient does not depend on the inputs, only on their shape and strides.
    inputs = inputs.float() if asked[1] else torch.empty_like(inputs, dtype=torch.float32)
    found = kernel(keys, gradient.float(), inputs, weight.float(), *sizes, [*asked, False])
    of_inputs, of_weight, _ = (None if each is None else each.bfloat16() for each in found)
    return of_inputs, of_weight, None


def _product_is_faster(gradient: Tensor, inputs: Tensor, weight: Tensor, *geometry: Sequence[int]) -> bool:
    """Whether the weight's gradient is faster as one product. Only for NHWC images, which are rows of pixels."""
    if weight.dim() != 4 or any(len(each) != 2 for each in geometry):
        return False
    if not all(each.is_contiguous(memory_format=torch.channels_last) for each in (gradient, inputs)):
        return False
    pixels = gradient.numel() // max(gradient.size(1), 1)
    if pixels * weight.numel() < WORTH_IT:
        return False
    if weight.size(2) == weight.size(3) == 1:
        return pixels <= _PIXELS_OF_1X1
    return pixels <= _PIXELS and pixels * weight[0].numel() <= _COLUMNS


def _of_weight(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the weight's gradient: the output's gradient times the unfolded input."""
    outputs, channels, height, width = weight.shape
    images = inputs.permute(0, 2, 3, 1)
    if any(padding):
        images = F.pad(images, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    image, row, column, channel = images.stride()
    of_pixels = (row * stride[0], column * stride[1])
    of_kernel = (row * dilation[0], column * dilation[1])
    windows = images.as_strided(
        (gradient.size(0), *gradient.shape[2:], height, width, channels), (image, *of_pixels, *of_kernel, channel)
    )
    columns = windows.reshape(-1, height * width * channels)
    product = gradient.permute(0, 2, 3, 1).reshape(-1, outputs).t() @ columns
    return product.view(outputs, height, width, channels).permute(0, 3, 1, 2)
