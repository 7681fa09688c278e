"""tanh, and tanh-approximated GELU with its gradient, for large bf16 tensors by C functions (``activations.c``).

GELU by the error function is left to torch, which is as fast. The gradient of a ReLU in fp32 is computed if the graph
has its output in bf16 (`nano_loop.kernels.narrow_copies`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import memory
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.override import BF16, COMPILED, FP32, Algorithm, Call, Override, is_copy
from nano_loop.patching.operators import Kernel
from nano_loop.patching.optimizers import laid_out_as, lies_as

_BF16 = memory.BF16._replace(layout=memory.DENSE)
_FP32 = memory.FP32._replace(layout=memory.DENSE)
KERNEL = CompiledKernel(
    "activations",
    {
        "tanh_forward": (_BF16,) * 2,
        "gelu_forward": (_BF16,) * 2,
        "gelu_backward": (_BF16,) * 3,
        "relu_backward": (_FP32, _BF16, _FP32),
    },
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
    out = torch.empty_like(tensors[-1], dtype=tensors[0].dtype)
    KERNEL(function, *tensors, out, out.numel())
    return out


_ALGORITHM = Algorithm(COMPILED, lambda call: computed(call.details, *call.tensors), BF16, is_raced=False)
OVERRIDES = tuple(
    Override(operator, (_ALGORITHM,), functools.partial(_supports, operator))
    for operator in ("tanh", "gelu", "gelu_backward")
)


def _supports_relu(kernel: Kernel, gradient: Tensor, output: Tensor, threshold: float) -> Call | None:
    if threshold != 0 or not is_copy(gradient, output) or gradient.shape != output.shape:
        return None
    return Call("gradient of ReLU", (gradient, output), kernel=kernel)


def _relu_gradient(call: Call) -> Tensor:
    gradient, output = call.tensors
    return computed("relu_backward", gradient if lies_as(gradient, output) else laid_out_as(output, gradient), output)


_RELU_GRADIENT = Algorithm("mixed", _relu_gradient, FP32, is_raced=False)
#: The gradient of a ReLU whose output the graph has in bf16.
RELU = Override("threshold_backward", (_RELU_GRADIENT,), _supports_relu, reads_copies=True)
