"""Draws the random numbers of an NHWC tensor in the order of NCHW, so that they are those of the plain loop.

torch fills a tensor in the order of its memory. With `channels_last`, dropout behind a convolution would thus have
other masks than in the plain loop, and `torch.randn_like` other noise. Here a contiguous tensor is filled and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nano_loop.patching.operators.operators import Kernel, gives_kernels, overridden
from nano_loop.patching.ownership import belongs_to_set_up_model
from nano_loop.patching.patch_table import shared_change, users

#: The operators that fill a tensor, besides ``bernoulli_.float``, which `nano_loop.kernels.dropout.bernoulli` replaces.
_FILLING = ("uniform_", "normal_", "exponential_")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@contextmanager
def drawn_as_nchw() -> Iterator[None]:
    """Draw the numbers of the set-up models' NHWC tensors in the order of NCHW, also those of their dropout masks.

    Before torch 2.9, which does not return its kernels, only dropout masks are drawn so.
    """
    with ExitStack() as stack:
        for operator in _FILLING if gives_kernels() else ():
            stack.enter_context(overridden(operator, _in_order, "CPU"))
        yield


def drawn_as_they_lie() -> AbstractContextManager[None]:
    """Return a context with draws in the order of memory after all: for a model that is NHWC in the plain loop, too."""
    return shared_change(drawn_as_they_lie, nullcontext)


def is_drawn_as_nchw(tensor: Tensor) -> bool:
    """Whether a tensor is NHWC because of nano_loop, so that the plain loop draws its numbers in another order."""
    if tensor.dim() not in _FORMATS or tensor.is_contiguous():
        return False
    lies_as_nhwc = tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])
    return lies_as_nhwc and not users(drawn_as_they_lie) and belongs_to_set_up_model()


def contiguous_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor of the shape and the dtype of another."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _in_order(original: Kernel | None) -> Callable[..., Tensor]:
    if original is None:
        raise TypeError("torch gives no kernel to call")

    def fill(keys: torch.DispatchKeySet, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_drawn_as_nchw(tensor):
            return tensor.copy_(original(keys, contiguous_like(tensor), *args, **kwargs))
        filled: Tensor = original(keys, tensor, *args, **kwargs)
        return filled

    return fill
