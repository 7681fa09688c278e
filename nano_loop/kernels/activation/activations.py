"""tanh, and the two GELUs with their gradients, for large tensors in bf16 or fp32, by C functions (``activations.c``).

GELU by the error function is torch's, but for its gradient in fp32: in bf16, torch's is as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import BF16, DENSE, FP32
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.patching.ownership import belongs_to_set_up_model

#: What the names of functions for these dtypes end in.
KINDS = {torch.bfloat16: "bf16", torch.float32: "float"}
_BF16, _FP32 = BF16._replace(layout=DENSE), FP32._replace(layout=DENSE)
KERNEL = CompiledKernel(
    "activations",
    {
        f"{name}_{kind}": (pointer,) * count
        for kind, pointer in (("bf16", _BF16), ("float", _FP32))
        for name, count in (("tanh_forward", 2), ("gelu_forward", 2), ("gelu_backward", 3), ("exact_gelu_backward", 3))
        if (name, kind) != ("exact_gelu_backward", "bf16")
    },
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
    name = "gelu_backward" if approximate == _BY_TANH else "exact_gelu_backward"
    is_faster = approximate == _BY_TANH or x.dtype is torch.float32
    return _computed(name, gradient, x) if is_faster and _supports(x) else None


#: Calls that do not belong to a set-up model return torch's own result, bitwise identical.
REPLACEMENTS = tuple(Replacement(compute.__name__, unless_none(compute)) for compute in (tanh, gelu, gelu_backward))


def _supports(x: Tensor) -> bool:
    return x.dtype in KINDS and x.numel() >= MIN_ELEMENTS and belongs_to_set_up_model()


def _computed(name: str, *tensors: Tensor) -> Tensor:
    """Call a C function that computes an element from those at its place."""
    out = torch.empty_like(tensors[-1])
    KERNEL(f"{name}_{KINDS[out.dtype]}", *tensors, out, out.numel())
    return out
