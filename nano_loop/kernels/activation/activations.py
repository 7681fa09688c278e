"""tanh, and GELU by tanh with its gradient, for large bf16 tensors, by C functions (``activations.c``)."""

from __future__ import annotations

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import BF16, DENSE
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.patching.ownership import belongs_to_set_up_model

_DENSE = BF16._replace(layout=DENSE)
KERNEL = CompiledKernel(
    "activations",
    {"tanh_forward": (_DENSE,) * 2, "gelu_forward": (_DENSE,) * 2, "gelu_backward": (_DENSE,) * 3},
)
#: Minimum number of elements. Below it, the Python overhead exceeds the gain.
MIN_ELEMENTS = 1 << 15

_BY_TANH = "tanh"


def tanh(x: Tensor) -> Tensor | None:
    """Compute ``aten::tanh``, or return None where torch has to."""
    return _computed("tanh_forward", x) if _supports(x) else None


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor | None:
    """Compute ``aten::gelu``, likewise."""
    return _computed("gelu_forward", x) if approximate == _BY_TANH and _supports(x) else None


def gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor | None:
    """Compute ``aten::gelu_backward``, likewise."""
    return _computed("gelu_backward", gradient, x) if approximate == _BY_TANH and _supports(x) else None


#: Calls that do not belong to a set-up model return torch's own result, bitwise identical.
REPLACEMENTS = tuple(Replacement(compute.__name__, unless_none(compute)) for compute in (tanh, gelu, gelu_backward))


def _supports(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.numel() >= MIN_ELEMENTS and belongs_to_set_up_model()


def _computed(name: str, *tensors: Tensor) -> Tensor:
    """Call a C function that computes an element from those at its place."""
    out = torch.empty_like(tensors[0])
    KERNEL(name, *tensors, out, out.numel())
    return out
