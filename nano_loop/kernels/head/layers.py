"""Selects the layers that are heads, with lazy output: ``aten::linear``, and products with a transposed weight."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

from nano_loop.kernels.head import functions
from nano_loop.kernels.head.cross_entropy import KERNEL
from nano_loop.kernels.head.head import may_be_head
from nano_loop.kernels.head.logits import LazyLogits, logits_of
from nano_loop.kernels.memory import computes_now, is_plain
from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.kernels.override import Algorithm, Call, Override
from nano_loop.patching.calls import calls
from nano_loop.patching.operators import Kernel
from nano_loop.patching.ownership import Rules, rules_now
from nano_loop.patching.torch_private import has_saved_tensor_hooks, in_mode
from nano_loop.patching.torch_private_autograd import in_backward, in_forward_mode
from nano_loop.patching.user_code import is_users

LazyLogits.functions = functions.FUNCTIONS
#: Minimum number of logits, and of classes. Below it, Python's overhead exceeds the gain.
LEAST_LOGITS, LEAST_CLASSES = 1 << 23, 1 << 13
LAZY = "lazy"
#: Operators that lazy logits compute themselves, without the rules of the user's lists of operators.
_COMPUTED = functions.FUNCTIONS.keys() | {"cross_entropy_loss"}


def _linear(kernel: Kernel, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    if weight.dim() != 2 or weight.size(0) < LEAST_CLASSES:
        return None
    return _call(kernel, hidden, weight, bias)


def _matmul(kernel: Kernel, hidden: Tensor, factor: Tensor) -> Call | None:
    if factor.dim() != 2 or factor.size(1) < LEAST_CLASSES or factor.stride(0) != 1:
        return None
    return _call(kernel, hidden, factor.t(), None)


def _call(kernel: Kernel, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Call | None:
    """Return the call of a layer whose output may be lazy: nothing observes or transforms its computation."""
    classes, width = weight.shape
    if hidden.dim() < 2 or hidden.numel() // max(width, 1) * classes < LEAST_LOGITS:
        return None
    if hidden.size(-1) != width or (bias is not None and bias.shape != (classes,)):
        return None
    others = [item for item in (hidden, weight, bias) if item is not None and not isinstance(item, NarrowWeight)]
    plain = all(is_plain(item, (hidden.dtype,)) for item in others) and weight.dtype is hidden.dtype
    if not plain or not computes_now() or in_mode() or has_saved_tensor_hooks() or in_backward() or in_forward_mode():
        return None
    return Call("head", (hidden, weight, bias), (), kernel)


def _lazily(call: Call) -> Tensor | None:
    rules, (hidden, weight, bias) = rules_now(), call.tensors
    if rules is None or not may_be_head(rules, weight) or _has_listed(rules) or _asks_for_types():
        return None
    KERNEL.calls += 1
    return logits_of(hidden, weight, bias, rules)


def _has_listed(rules: Rules) -> bool:
    """Whether the user has listed an operator that lazy logits would compute, in ``bf16_ops`` or ``fp32_ops``."""
    return any(name.partition(".")[0] in _COMPUTED for name in rules.operators)


def _asks_for_types() -> bool:
    """Whether the code of the model that leads to the head, or the code that called the model, uses ``type``."""
    frame: FrameType | None = sys._getframe(1)
    is_loop = False
    while frame is not None:
        code = frame.f_code
        is_loop |= code.co_filename == calls.__file__
        if is_users(code.co_filename) and ("type" in code.co_names or is_loop):
            return "type" in code.co_names
        frame = frame.f_back
    return False


OVERRIDES = tuple(
    Override(
        name,
        (Algorithm(LAZY, _lazily, (torch.float32, torch.bfloat16), kernel=KERNEL.name, is_raced=False),),
        supports,
        dispatch_key="AutogradCPU",
        otherwise=operator.default.decompose,
    )
    for name, supports, operator in (
        ("linear", _linear, torch.ops.aten.linear),
        ("matmul", _matmul, torch.ops.aten.matmul),
    )
)
