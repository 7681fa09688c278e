"""tanh, and tanh-approximated GELU with its gradient, for large bf16 tensors by C functions (``activations.c``).

GELU by the error function is left to torch, which is as fast.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import memory
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.override import BF16, COMPILED, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel

_BF16 = memory.BF16._replace(layout=memory.DENSE)
KERNEL = CompiledKernel(
    "activations", {"tanh_forward": (_BF16,) * 2, "gelu_forward": (_BF16,) * 2, "gelu_backward": (_BF16,) * 3}
)
#: Minimum number of elements. Below it, the Python overhead exceeds the gain.
MIN_ELEMENTS = 1 << 15

#: The C functions by operator and approximation. GELU by the error function has none.
_FUNCTIONS = {
    ("tanh", "none"): "tanh_forward",
    ("gelu", "tanh"): "gelu_forward",
    ("gelu_backward", "tanh"): "gelu_backward",
}


def _supports(operator: str, kernel: Kernel, *tensors: Tensor, **kwargs: Any) -> Call | None:
    function = _FUNCTIONS.get((operator, kwargs.get("approximate", "none")))
    if function is None or tensors[-1].dtype is not torch.bfloat16 or tensors[-1].numel() < MIN_ELEMENTS:
        return None
    return Call(operator, tensors, kernel=kernel, details=function)


def computed(function: str, *tensors: Tensor) -> Tensor:
    """Call a C function that computes each element from the elements at the same position."""
    out = torch.empty_like(tensors[-1])
    KERNEL(function, *tensors, out, out.numel())
    return out


_ALGORITHM = Algorithm(COMPILED, lambda call: computed(call.details, *call.tensors), BF16, is_raced=False)
OVERRIDES = tuple(
    Override(operator, (_ALGORITHM,), functools.partial(_supports, operator))
    for operator in ("tanh", "gelu", "gelu_backward")
)
