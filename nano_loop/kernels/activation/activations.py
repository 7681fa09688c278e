"""tanh, and the two GELUs with their gradients, for large tensors in bf16 or fp32, by C functions (``activations.c``).

GELU by the error function is torch's, but for its gradient in fp32: in bf16, torch's is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.fp32 import COMPILED, TORCH, Arguments, is_compiled, rule_of
from nano_loop.kernels.memory import BF16, DENSE, FP32
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.ownership import belongs_to_set_up_model, rule_for

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

#: The C functions by operator and approximation. There is none for GELU by the error function.
_FUNCTIONS = {
    ("tanh", "none"): "tanh_forward",
    ("gelu", "tanh"): "gelu_forward",
    ("gelu_backward", "tanh"): "gelu_backward",
    ("gelu_backward", "none"): "exact_gelu_backward",
}
_RULE = rule_of(KERNEL)


def _replacing(operator: str) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return the `make` of a replacement. Calls that do not belong to a set-up model are torch's, to the bit."""

    def ours(kernel: Kernel, *tensors: Tensor, **kwargs: Any) -> Tensor | None:
        x, function = tensors[-1], _FUNCTIONS.get((operator, kwargs.get("approximate", "none")))
        if function is None or x.dtype not in KINDS or x.numel() < MIN_ELEMENTS:
            return None
        name = f"{function}_{KINDS[x.dtype]}"
        if name not in KERNEL.functions:
            return None
        if x.dtype is torch.float32:
            is_ours = is_compiled(
                rule_for(_RULE),
                Arguments(name, tensors),
                lambda: {TORCH: partial(kernel, **kwargs), COMPILED: partial(_computed, name)},
            )
        else:
            is_ours = belongs_to_set_up_model()
        return _computed(name, *tensors) if is_ours else None

    return unless_none(ours)


def _computed(name: str, *tensors: Tensor) -> Tensor:
    """Call a C function that computes an element from those at its place."""
    out = torch.empty_like(tensors[-1])
    KERNEL(name, *tensors, out, out.numel())
    return out


REPLACEMENTS = tuple(Replacement(operator, _replacing(operator)) for operator in ("tanh", "gelu", "gelu_backward"))
