"""Means over the pixels of images in NHWC, such as global average pooling, whose gradients are in NHWC as well.

torch divides the expanded gradient of such a mean into a tensor in NCHW. Added to another gradient of the same images,
as in squeeze-and-excitation blocks, it makes their sum NCHW, and all that follows slow: a fifth of EfficientNet's step
in bf16. In fp32, the backward of a ReLU takes 15 times as long with it. The mean of the images with their channels
last, a view, has the same bits, and so has its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nano_loop.patching.operators.operators import Kernel, gives_kernels, overridden
from nano_loop.patching.ownership import belongs_to_set_up_model
from nano_loop.patching.torch_private import in_dispatch_mode


def gradients_in_nhwc() -> AbstractContextManager[None]:
    """Return a context in which means of set-up models' images have gradients in NHWC, with torch 2.9 and later."""
    return overridden("mean.dim", _with_channels_last, "AutogradCPU") if gives_kernels() else nullcontext()


def _with_channels_last(original: Kernel | None) -> Callable[..., Tensor]:
    assert original is not None

    def mean(
        keys: torch.DispatchKeySet, x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, **kwargs: Any
    ) -> Tensor:
        if _is_image(x) and dim and sorted(dimension % 4 for dimension in dim) == [2, 3] and belongs_to_set_up_model():
            means = x.permute(0, 2, 3, 1).mean((1, 2), **kwargs)
            return means[:, :, None, None] if keepdim else means
        result: Tensor = original(keys, x, dim, keepdim, **kwargs)
        return result

    return mean


def _is_image(x: Tensor) -> bool:
    """Whether a tensor has a gradient, and lies in NHWC and not also in NCHW."""
    if x.dim() != 4 or x.dtype not in (torch.bfloat16, torch.float32) or not x.requires_grad or x.is_contiguous():
        return False
    if torch.compiler.is_compiling() or in_dispatch_mode():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)
