"""tanh, and GELU by tanh with its gradient, for large bf16 tensors, by C functions (``activations.c``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nano_loop.intercept.operators import Kernel
from nano_loop.intercept.optimizers import is_dense
from nano_loop.intercept.ownership import belongs_to_set_up_model
from nano_loop.kernels.compiled import UnavailableError, compiled_for_threads

#: Minimum number of elements. Below it, the Python overhead exceeds the gain.
WORTH_IT = 1 << 15

_BY_TANH = "tanh"


def unavailable() -> str | None:
    """Return why these kernels cannot be used in this process, or None."""
    try:
        compiled_for_threads("activations")
    except UnavailableError as error:
        return str(error)
    return None


def _of_tanh(original: Kernel | None) -> Callable[..., Tensor]:
    assert original is not None

    def tanh(keys: torch.DispatchKeySet, x: Tensor) -> Tensor:
        if _fits(x):
            return _computed("tanh_forward", x)
        found: Tensor = original(keys, x)
        return found

    return tanh


def _of_gelu(original: Kernel | None) -> Callable[..., Tensor]:
    assert original is not None

    def gelu(keys: torch.DispatchKeySet, x: Tensor, *, approximate: str = "none") -> Tensor:
        if approximate == _BY_TANH and _fits(x):
            return _computed("gelu_forward", x)
        found: Tensor = original(keys, x, approximate=approximate)
        return found

    return gelu


def _of_gelu_backward(original: Kernel | None) -> Callable[..., Tensor]:
    assert original is not None

    def gelu_backward(keys: torch.DispatchKeySet, gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
        alike = gradient.dtype is x.dtype and gradient.shape == x.shape and gradient.stride() == x.stride()
        if approximate == _BY_TANH and alike and _fits(x):
            return _computed("gelu_backward", gradient, x)
        found: Tensor = original(keys, gradient, x, approximate=approximate)
        return found

    return gelu_backward


#: By the ATen operator, what makes the replacement of its CPU kernel from the original one. Calls that do not belong to
#: a set-up model return torch's own result, bitwise identical.
REPLACEMENTS: Mapping[str, Callable[[Kernel | None], Callable[..., Tensor]]] = {
    "tanh": _of_tanh,
    "gelu": _of_gelu,
    "gelu_backward": _of_gelu_backward,
}


def _fits(x: Tensor) -> bool:
    large = x.dtype is torch.bfloat16 and x.numel() >= WORTH_IT
    return large and belongs_to_set_up_model() and (x.is_contiguous() or is_dense(x))


def _computed(name: str, *tensors: Tensor) -> Tensor:
    """Call a C function that computes an element from those at its place."""
    out = torch.empty_like(tensors[0])
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (*tensors, out)]
    function: Any = getattr(compiled_for_threads("activations"), name)
    function(*pointers, ctypes.c_int64(out.numel()), ctypes.c_int(torch.get_num_threads()))
    return out
