"""tanh, and GELU by tanh with its gradient, for large tensors in bf16, by C functions (``activations.c``).

GELU by the error function is torch's, which is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import BF16, DENSE
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.ownership import belongs_to_set_up_model

_BF16 = BF16._replace(layout=DENSE)
KERNEL = CompiledKernel(
    "activations", {"tanh_forward": (_BF16,) * 2, "gelu_forward": (_BF16,) * 2, "gelu_backward": (_BF16,) * 3}
)
#: Minimum number of elements. Below it, the Python overhead exceeds the gain.
MIN_ELEMENTS = 1 << 15

#: The C functions by operator and approximation. There is none for GELU by the error function.
_FUNCTIONS = {
    ("tanh", "none"): "tanh_forward",
    ("gelu", "tanh"): "gelu_forward",
    ("gelu_backward", "tanh"): "gelu_backward",
}


def _replacing(operator: str) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return the `make` of a replacement. Calls that do not belong to a set-up model are torch's, to the bit."""

    def ours(kernel: Kernel, *tensors: Tensor, **kwargs: Any) -> Tensor | None:
        x, function = tensors[-1], _FUNCTIONS.get((operator, kwargs.get("approximate", "none")))
        if function is None or x.dtype is not torch.bfloat16 or x.numel() < MIN_ELEMENTS:
            return None
        return computed(function, *tensors) if belongs_to_set_up_model() else None

    return unless_none(ours)


def computed(function: str, *tensors: Tensor) -> Tensor:
    """Call a C function that computes an element from those at its place."""
    out = torch.empty_like(tensors[-1])
    KERNEL(function, *tensors, out, out.numel())
    return out


REPLACEMENTS = tuple(Replacement(operator, _replacing(operator)) for operator in ("tanh", "gelu", "gelu_backward"))
