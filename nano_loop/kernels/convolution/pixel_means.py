"""Means over the pixels of images in NHWC, such as global average pooling, without materialized gradients.

torch divides the expanded gradient of such a mean into an NCHW tensor. Added to another gradient of the same images, as
in squeeze-and-excitation blocks, it makes their sum NCHW and everything after it slow: a fifth of EfficientNet's step
in bf16. In fp32, the backward of a ReLU takes 15 times as long with it. Here the gradient of the mean is divided first
and then expanded, as torch does for a sum: the result is bitwise identical, and sums keep the layout of the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.memory import computes_now
from nano_loop.kernels.override import BF16, FP32, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.torch_private_autograd import in_forward_mode


def _supports(
    kernel: Kernel, x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, **kwargs: Any
) -> Call | None:
    if not _is_image(x) or not dim or sorted(dimension % 4 for dimension in dim) != [2, 3]:
        return None
    return Call("means over pixels", (x,), (keepdim, kwargs.get("dtype")))


def _computed(call: Call) -> Tensor:
    return _Means.apply(*call.tensors, *call.numbers)  # type: ignore[no-any-return, no-untyped-call]


OVERRIDES = (
    Override(
        *("mean.dim", (Algorithm("expanded", _computed, (*BF16, *FP32), is_raced=False),), _supports),
        dispatch_key="AutogradCPU",
    ),
)


class _Means(torch.autograd.Function):
    """The means over the pixels of images, in the images' dtype or in another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return torch.ops.aten.mean(x.detach(), (2, 3), keepdim, dtype=dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """See `torch.autograd.Function`."""
        if gradient is None:
            return None, None, None
        of_pixels = (gradient / ctx.shape[2:].numel()).to(ctx.dtype)
        return of_pixels.view(*ctx.shape[:2], 1, 1).expand(ctx.shape), None, None


def _is_image(x: Tensor) -> bool:
    """Whether a tensor requires a gradient and is in NHWC but not also in NCHW."""
    if x.dim() != 4 or not x.requires_grad or x.is_contiguous():
        return False
    if in_forward_mode() or not computes_now():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)
