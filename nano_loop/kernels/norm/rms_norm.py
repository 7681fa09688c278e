"""RMS norms of fp32 tensors, forward and backward, by the C functions of layer norms (``norms.c``).

torch composes an RMS norm of six operators, and its backward of more than ten, which each read and write the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.fp32 import COMPILED, TORCH, Arguments, is_compiled
from nano_loop.kernels.memory import empty, is_plain
from nano_loop.kernels.norm.norm_arguments import are_fp32, rows_of, supports_rows
from nano_loop.kernels.norm.norms import KERNEL, RULE
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.patching.ownership import rule_for
from nano_loop.patching.torch_private import below_autocast, in_dispatch_mode, in_functorch, is_batched

#: Minimum number of elements. Below it, the Python of autograd's function takes as long as torch's operators.
MIN_ELEMENTS = 1 << 14


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute `torch.nn.functional.rms_norm` of a contiguous tensor in fp32. It can be differentiated twice."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out: Tensor = _RmsNorm.apply(x, [*shape], weight, float(eps))  # type: ignore[no-untyped-call]
    return out


def _computed(
    kernel: Callable[..., Any],
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    """Compute ``aten::rms_norm``, or return None where torch has to."""
    if x.dtype is not torch.float32 or x.numel() < MIN_ELEMENTS:
        return None
    rule = rule_for(RULE)
    if rule is None or not _supports(x, shape, weight):
        return None
    call = Arguments("rms_norm", (x, [*shape], weight, eps), is_differentiated=True)
    algorithms = {TORCH: kernel, COMPILED: rms_norm}
    return rms_norm(x, shape, weight, eps) if is_compiled(rule, call, lambda: algorithms) else None


def _supports(x: Tensor, shape: Sequence[int], weight: Tensor | None) -> bool:
    if in_functorch() or in_dispatch_mode() or not all(is_plain(one) for one in (x, weight) if one is not None):
        return False
    if not supports_rows(x, shape) or not x.is_contiguous():
        return False
    return weight is None or (weight.shape == torch.Size(shape) and are_fp32(weight.numel(), weight))


REPLACEMENTS = (Replacement("rms_norm", unless_none(_computed), "AutogradCPU"),)


class _RmsNorm(torch.autograd.Function):
    """As `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Tensor:
        rows, width, is_bf16 = rows_of(x, shape)
        out, inverses = torch.empty_like(x), empty(rows)
        KERNEL("layer_norm", x, rows, width, is_bf16, weight, None, eps, out, None, inverses)
        ctx.save_for_backward(x, weight, inverses)
        ctx.numbers = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, inverses), (shape, eps) = ctx.saved_tensors, ctx.numbers
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        # For a second derivative, and for many gradients at a time.
        if torch.is_grad_enabled() or is_batched(gradient):
            of_x, of_weight = _differentiable(x, shape, weight, eps, gradient, (needs_x, needs_weight))
            return of_x, None, of_weight, None
        of_x = torch.empty_like(x) if needs_x else None
        of_weight = empty(*shape) if needs_weight else None
        arguments = (gradient.contiguous(), x, *rows_of(x, shape), weight, None, inverses, of_x, of_weight, None)
        if not KERNEL("layer_norm_backward", *arguments):
            of_x, of_weight = _differentiable(x, shape, weight, eps, gradient, (needs_x, needs_weight))
        return of_x, None, of_weight, None


def _differentiable(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float, gradient: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients that are needed, computed from operators that can be differentiated again."""
    has_second = torch.is_grad_enabled()
    with torch.enable_grad(), below_autocast():
        dimensions = [*range(-len(shape), 0)]
        out = x * (x.square().mean(dimensions, keepdim=True) + eps).rsqrt()
        out = out if weight is None else out * weight
        leaves = [leaf for leaf, is_needed in zip((x, weight), needs, strict=True) if is_needed and leaf is not None]
        computed = iter(torch.autograd.grad(out, leaves, gradient, create_graph=has_second))
    of_x, of_weight = (next(computed) if is_needed else None for is_needed in needs)
    return of_x, of_weight
