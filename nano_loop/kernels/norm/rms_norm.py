"""RMS norms of fp32 and bf16 tensors, forward and backward, by the C functions of layer norms (``norms.c``).

torch composes an RMS norm of six operators, and its backward of over ten, each of which reads and writes the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.double_backward import gradients_of
from nano_loop.kernels.memory import computes_now, empty, has_tangent, is_plain
from nano_loop.kernels.norm.norms import KERNEL, rows_of, supports_rows
from nano_loop.kernels.override import BF16, COMPILED, FP32, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel

#: Minimum number of elements. Below it, the overhead of a Python autograd function is as large as torch's operators.
MIN_ELEMENTS = 1 << 14
#: The dtypes of weights, by dtype of the input, for which the result has the input's dtype.
_WEIGHTS = {torch.float32: FP32, torch.bfloat16: BF16 + FP32}


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute `torch.nn.functional.rms_norm` of a contiguous tensor. It is twice differentiable."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps  # torch's default in bf16, too
    if x.dtype is torch.bfloat16 and x.requires_grad and torch.is_grad_enabled():
        # torch's backward reads a copy in fp32, so a program may modify the input: ``x += layer(norm(x))``.
        x = x.clone()
    out: Tensor = _RmsNorm.apply(x, weight, [*shape], float(eps))  # type: ignore[no-untyped-call]
    return out


def _supports(
    kernel: Kernel, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Call | None:
    """Return a call of ``aten::rms_norm`` that is large enough and supported."""
    if x.dtype not in _WEIGHTS or x.numel() < MIN_ELEMENTS:
        return None
    return Call("rms_norm", (x,), ([*shape], weight, eps), kernel, leaves=1)


def _is_taken(call: Call) -> bool:
    (x,), (shape, weight, _) = call.tensors, call.numbers
    tensors = [tensor for tensor in (x, weight) if tensor is not None]
    if not computes_now() or any(map(has_tangent, tensors)) or not supports_rows(x, shape):
        return False
    if not x.is_contiguous() or (weight is not None and not is_plain(weight, _WEIGHTS[x.dtype])):
        return False
    if weight is not None and weight.requires_grad and torch.is_grad_enabled() and not x.requires_grad:
        return False  # torch's backward does not read x
    return weight is None or weight.shape == torch.Size(shape)


def _computed(call: Call) -> Tensor:
    return rms_norm(*call.tensors, *call.numbers)


_ALGORITHMS = (
    Algorithm(COMPILED, _computed, BF16, supports=_is_taken, is_raced=False),
    Algorithm(COMPILED, _computed, FP32, supports=_is_taken, kernel=KERNEL.name),
)
OVERRIDES = (Override("rms_norm", _ALGORITHMS, _supports, dispatch_key="AutogradCPU"),)


def _in_fp32(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float()


class _RmsNorm(torch.autograd.Function):
    """Computes `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float) -> Tensor:
        rows, width, is_bf16 = rows_of(x, shape)
        out, inverses = torch.empty_like(x), empty(rows)
        KERNEL("layer_norm", x, rows, width, is_bf16, _in_fp32(weight), None, eps, out, None, inverses)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, inverses)
        ctx.numbers = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        (x, weight, inverses), (shape, eps) = ctx.saved_tensors, ctx.numbers

        def compute() -> tuple[Tensor | None, Tensor | None] | None:
            of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            of_weight = empty(*shape) if ctx.needs_input_grad[1] else None
            first = (gradient.contiguous(), x, *rows_of(x, shape), _in_fp32(weight))
            if not KERNEL("layer_norm_backward", *first, None, inverses, of_x, of_weight, None):
                return None
            return of_x, None if of_weight is None else of_weight.to(weight.dtype)

        def by_torch(x: Tensor, weight: Tensor | None) -> Tensor:
            out: Tensor = torch.ops.aten.rms_norm.default.decompose(x, shape, weight, eps)
            return out

        return gradients_of(ctx, (x, weight), (gradient,), compute, by_torch)
