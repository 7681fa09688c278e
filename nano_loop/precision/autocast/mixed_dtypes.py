"""Operators that refuse bf16 together with fp32, as autocast gives it to them: they compute in fp32.

CUDA's autocast promotes the inputs of most of them, or lists them for fp32. On a CPU, autocast leaves them as they
are, so a graph convolution (`torch.sparse.mm`) and pooling by `scatter_add_` raise torch's bare dtype error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.operators.operators import Kernel, gives_kernels, kernel, overridden_together
from nano_loop.patching.ownership import call_state
from nano_loop.patching.torch_private import SPARSE_PRODUCTS, as_without_autocast_kernel, below_autocast
from nano_loop.precision.autocast.autocast import to_fp32

#: Out of place: bf16 inputs are cast to fp32 if there are others, or if one input is sparse.
_PROMOTED = (
    *(*SPARSE_PRODUCTS, "dot", "mv", "addmv", "linalg_cross", "lerp.Scalar"),
    *("lerp.Tensor", "scatter_add", "scatter_reduce.two", "index_add", "index_put", "masked_scatter"),
)
#: In place: the other inputs are cast to the dtype of the tensor that is written to.
_WRITING = ("scatter_add_", "scatter_reduce_.two", "index_add_", "index_put_", "masked_scatter_")
#: Operators for which autocast casts to bf16, also CSR matrices, for which torch has no bf16 kernel.
_PRODUCTS = ("mm", "matmul", "addmm")
_KEY = "AutocastCPU"
_CAST = (torch.float32, torch.bfloat16, torch.float16)
_CSR = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def mixed_dtypes_accepted() -> AbstractContextManager[None]:
    """Let these operators of set-up models compute with mixed dtypes, until the last user of this context exits."""
    return overridden_together("mixed dtypes", _functions, _KEY)


def _functions() -> dict[str, Callable[..., Any]]:
    products = {name: _in_fp32_if_csr(name, kernel(name, _KEY)) for name in _PRODUCTS if gives_kernels()}
    return {**_without_kernels(), **products}


@functools.cache
def _without_kernels() -> dict[str, Callable[..., Any]]:
    return {name: _promoting(name) for name in _PROMOTED} | {name: _writing(name) for name in _WRITING}


def _promoting(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def promoting(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
        sparse = any(tensor.layout is not torch.strided for tensor in tensors)
        if sparse and not call_state.accelerated:  # composed of products, for which autocast has kernels
            return as_without_autocast_kernel(operator, keys, *args, **kwargs)
        with below_autocast():
            if call_state.accelerated and (sparse or len({tensor.dtype for tensor in tensors}) > 1):
                args, kwargs = map_tensors(to_fp32, (args, kwargs))
            return operator(*args, **kwargs)

    return promoting


def _writing(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def writing(keys: torch.DispatchKeySet, written: Tensor, *args: Any, **kwargs: Any) -> Any:
        if call_state.accelerated and written.dtype in _CAST:
            args, kwargs = map_tensors(lambda other: _cast(other, written.dtype), (args, kwargs))
        with below_autocast():
            return operator(written, *args, **kwargs)

    return writing


def _in_fp32_if_csr(name: str, original: Kernel) -> Callable[..., Any]:
    operator = _operator(name)

    def product(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if call_state.accelerated and any(isinstance(arg, Tensor) and arg.layout in _CSR for arg in args):
            with below_autocast():
                return operator(*map_tensors(to_fp32, args), **kwargs)
        return original(keys, *args, **kwargs)

    return product


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in _CAST else tensor
