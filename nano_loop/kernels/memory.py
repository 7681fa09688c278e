"""Checked pointers to tensors for C functions, and memory for their results.

A C function computes wrong values or crashes the process if a tensor has an unexpected dtype or unexpected strides. So
`nano_loop.kernels.build.CompiledKernel` only accepts tensors by declared pointers, and memory does not depend on the
user's default dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nano_loop.patching.optimizers import is_dense, lies_as
from nano_loop.patching.torch_private import in_dispatch_mode, in_functorch

#: The layouts of the tensors of a call: contiguous rows; any dense order that is the same for all tensors of the call;
#: any strides, which the call passes in a structure.
CONTIGUOUS, DENSE, STRIDED = "contiguous", "dense", "strided"
#: The memory formats of images and volumes in which the channels of a pixel are contiguous, by number of dimensions.
NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}

_Result = TypeVar("_Result")


class UnsupportedTensorError(RuntimeError):
    """A C function was not called because it does not support one of the tensors. torch's kernel does."""


class Pointer(NamedTuple):
    """A parameter of a C function that accepts a tensor of one of some dtypes, or None.

    `layout` is the order of the elements in memory: `CONTIGUOUS`, `DENSE` or `STRIDED`.
    """

    dtypes: tuple[torch.dtype, ...]
    layout: str = CONTIGUOUS

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory, and a dtype and layout that the function supports."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.dtype not in self.dtypes:
            return False
        if tensor.is_neg() or (self.layout == CONTIGUOUS and not tensor.is_contiguous()):
            return False
        try:
            return tensor.data_ptr() != 0 or not tensor.numel()  # 0: the storage was released
        except RuntimeError:  # tensors of vmap, tracing, and other wrappers
            return False


BF16, FP32, INT64 = (Pointer((dtype,)) for dtype in (torch.bfloat16, torch.float32, torch.int64))
BYTES = Pointer((torch.uint8,))
FLOATS = Pointer((torch.bfloat16, torch.float32))


def check(tensors: Sequence[Tensor | None], pointers: Sequence[Pointer]) -> None:
    """Raise `UnsupportedTensorError` unless the declared pointers accept the tensors of a call."""
    first: Tensor | None = None
    for tensor, pointer in zip(tensors, pointers, strict=True):
        if tensor is None:
            continue
        if not pointer.accepts(tensor):
            raise UnsupportedTensorError(f"a C function does not support a {tensor.dtype} tensor of this layout")
        if pointer.layout == DENSE:
            if not (tensor.is_contiguous() or is_dense(tensor) if first is None else lies_as(tensor, first)):
                raise UnsupportedTensorError("a C function does not support tensors of different layouts")
            first = tensor if first is None else first


def attempt(compute: Callable[..., _Result | None], *args: Any, **kwargs: Any) -> _Result | None:
    """Return the result of a function, or None if a C function in it does not support a tensor: torch then computes."""
    try:
        return compute(*args, **kwargs)
    except UnsupportedTensorError:
        return None


def is_plain(tensor: Tensor, dtypes: tuple[torch.dtype, ...], layout: str = STRIDED) -> bool:
    """Whether a tensor is not a subclass, and has memory, one of these dtypes and this layout."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and Pointer(dtypes, layout).accepts(tensor)


def computes_now() -> bool:
    """Whether operators compute values now, without tracing, transforms or modes."""
    return not (torch.compiler.is_compiling() or in_functorch() or in_dispatch_mode())


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor has a forward-mode tangent."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def empty(
    *sizes: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Return an uninitialized CPU tensor of this dtype, regardless of torch's defaults."""
    return torch.empty(*sizes, dtype=dtype, device="cpu", memory_format=layout)
