"""The operators of batch norm in training, by torch's kernels, which Inductor would decompose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nano_loop.compiling.operators.library import NAMESPACE

torch.library.define(
    f"{NAMESPACE}::batch_norm", "(Tensor input, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    f"{NAMESPACE}::batch_norm_backward",
    "(Tensor gradient, Tensor input, Tensor weight, Tensor mean, Tensor inverse_std, float eps) "
    "-> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(f"{NAMESPACE}::batch_norm", "CPU")
def _batch_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's kernel does for a batch in training: the output, the means, and 1 / standard deviation."""
    return torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)


@torch.library.register_fake(f"{NAMESPACE}::batch_norm")  # type: ignore[untyped-decorator]
def _batch_norm_like(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


@torch.library.impl(f"{NAMESPACE}::batch_norm_backward", "CPU")
def _batch_norm_backward(
    gradient: Tensor, input: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, input, weight, None, None, mean, inverse_std, True, eps, [True, True, True]
    )
    return of_input, of_weight, of_bias


@torch.library.register_fake(f"{NAMESPACE}::batch_norm_backward")  # type: ignore[untyped-decorator]
def _batch_norm_backward_like(
    gradient: Tensor, input: Tensor, weight: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


def _save_batch_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, _, ctx.eps = inputs
    ctx.save_for_backward(input, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_batch_norm(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    input, *_ = ctx.saved_tensors
    # torch's kernel takes ten times as long where the two are laid out differently.
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if input.dim() == dimensions and input.is_contiguous(memory_format=layout):
            gradient = gradient.contiguous(memory_format=layout)
    return *torch.ops.nano_loop.batch_norm_backward(gradient, *ctx.saved_tensors, ctx.eps), None


torch.library.register_autograd(f"{NAMESPACE}::batch_norm", _differentiate_batch_norm, setup_context=_save_batch_norm)
