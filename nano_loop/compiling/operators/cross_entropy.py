"""The operators of cross-entropy, `nano_loop.kernels.cross_entropy`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nano_loop.compiling.operators.library import NAMESPACE, Context
from nano_loop.kernels import cross_entropy as losses

torch.library.define(
    f"{NAMESPACE}::cross_entropy",
    "(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    f"{NAMESPACE}::cross_entropy_backward",
    "(Tensor factors, Tensor logits, Tensor target, Tensor maxima, Tensor log_sums, int ignore_index, "
    "float label_smoothing) -> Tensor",
)


@torch.library.impl(f"{NAMESPACE}::cross_entropy", "CPU")
def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, and what the backward needs. A target that is not a class is torch's error."""
    context = Context()
    found = losses._Losses.forward(context, logits, None, None, target, ignore_index, label_smoothing)
    if found is None:
        torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index)
        raise IndexError("a target of cross-entropy is not a class")
    _, _, maxima, log_sums = context.saved_tensors
    assert maxima is not None
    assert log_sums is not None
    return found, maxima, log_sums


@torch.library.register_fake(f"{NAMESPACE}::cross_entropy")  # type: ignore[untyped-decorator]
def _cross_entropy_like(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.size(0), dtype=torch.float32) for _ in range(3))


@torch.library.impl(f"{NAMESPACE}::cross_entropy_backward", "CPU")
def _cross_entropy_backward(
    factors: Tensor,
    logits: Tensor,
    target: Tensor,
    maxima: Tensor,
    log_sums: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    context = Context(
        saved_tensors=(logits, target, maxima, log_sums),
        upcast=None,
        dtype=logits.dtype,
        ignored=ignore_index,
        smoothing=label_smoothing,
    )
    with torch.no_grad():
        gradient, *_ = losses._Losses.backward(context, factors)
    assert gradient is not None
    return gradient


@torch.library.register_fake(f"{NAMESPACE}::cross_entropy_backward")  # type: ignore[untyped-decorator]
def _cross_entropy_backward_like(factors: Tensor, logits: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(logits)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignored, ctx.smoothing = inputs
    ctx.save_for_backward(logits, target, *output[1:])


def _differentiate_cross_entropy(ctx: Any, factors: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    arguments = (factors, *ctx.saved_tensors, ctx.ignored, ctx.smoothing)
    return torch.ops.nano_loop.cross_entropy_backward(*arguments), None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::cross_entropy", _differentiate_cross_entropy, setup_context=_save_cross_entropy
)
