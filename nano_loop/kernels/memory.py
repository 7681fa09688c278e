"""The checked way from tensors to pointers for C functions, and to memory for their results.

A C function computes wrong numbers, or ends the process, where a tensor has another dtype or other strides than it
expects. So `nano_loop.kernels.build.CompiledKernel` takes tensors by declared pointers only, and no memory depends on
the dtype and the device that the user has made torch's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nano_loop.patching.objects.optimizers import is_dense, lies_as
from nano_loop.patching.torch_private import in_dispatch_mode, in_functorch

#: The layouts of the tensors of a call: rows side by side; any order without gaps, which is the same for all tensors of
#: the call; any strides, which the call has in a structure.
CONTIGUOUS, DENSE, STRIDED = "contiguous", "dense", "strided"

_Result = TypeVar("_Result")


class UnsupportedTensorError(RuntimeError):
    """A C function was not called, since it does not take one of the tensors. torch's kernel does."""


class Pointer(NamedTuple):
    """A parameter of a C function for a tensor, or for None.

    Attributes
    ----------
    dtypes : tuple of torch.dtype
        The dtypes of the elements.
    layout : {"contiguous", "dense", "strided"}
        The order of the elements in memory.
    """

    dtypes: tuple[torch.dtype, ...]
    layout: str = CONTIGUOUS

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor has elements in memory, of a dtype and in an order that the function reads."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.dtype not in self.dtypes:
            return False
        if tensor.is_neg() or (self.layout == CONTIGUOUS and not tensor.is_contiguous()):
            return False
        try:
            return tensor.data_ptr() != 0 or not tensor.numel()  # 0: the storage was released
        except RuntimeError:  # the tensors of vmap, of tracing, and other wrappers
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
            raise UnsupportedTensorError(f"a C function takes no {tensor.dtype} tensor of this layout")
        if pointer.layout == DENSE:
            if not (tensor.is_contiguous() or is_dense(tensor) if first is None else lies_as(tensor, first)):
                raise UnsupportedTensorError("a C function takes no tensors of different layouts")
            first = tensor if first is None else first


def attempt(compute: Callable[..., _Result | None], *args: Any, **kwargs: Any) -> _Result | None:
    """Return what a function computes, or None where a C function in it does not take a tensor: torch computes then."""
    try:
        return compute(*args, **kwargs)
    except UnsupportedTensorError:
        return None


def is_plain(tensor: Tensor, dtypes: tuple[torch.dtype, ...], layout: str = STRIDED) -> bool:
    """Whether a tensor is no subclass, and has elements in memory, of one of these dtypes and in this order."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and Pointer(dtypes, layout).accepts(tensor)


def computes_now() -> bool:
    """Whether operators compute numbers now: nobody traces, transforms or watches them."""
    return not (torch.compiler.is_compiling() or in_functorch() or in_dispatch_mode())


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor has a derivative of forward mode."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def empty(
    *sizes: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Return a tensor of this dtype on the CPU, whatever torch's defaults are. Its elements are not initialized."""
    return torch.empty(*sizes, dtype=dtype, device="cpu", memory_format=layout)
