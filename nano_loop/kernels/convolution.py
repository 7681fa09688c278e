"""Gradients of bf16 convolutions by plain matrix products and sums, where oneDNN's kernels are slow.

oneDNN computes a weight's gradient image by image. For images with few pixels, and for 1×1 kernels, a single product
over the pixels of all images is faster. For the bias of a transposed convolution, oneDNN's sum takes several times as
long as the rest of the backward. docs/performance.md has the times.
"""

from __future__ import annotations

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
            if output_mask[2] and (by_product or transposed):
                ours[2] = gradient.sum([0, *range(2, gradient.dim())])
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
