"""The operators of attention by plain products, `nano_loop.kernels.plain_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nano_loop.compiling.operators.library import DRAWS, NAMESPACE, Context
from nano_loop.kernels import plain_attention

torch.library.define(
    f"{NAMESPACE}::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, float scale, int number) "
    "-> (Tensor, Tensor, Tensor)",
    tags=DRAWS,
)
torch.library.define(
    f"{NAMESPACE}::attention_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor probabilities, Tensor kept, "
    "float dropout_p, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(f"{NAMESPACE}::attention", "CPU")
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `nano_loop.kernels.plain_attention`, and what its backward needs."""
    context = Context()
    out = plain_attention._Attention.forward(context, query, key, value, mask, dropout_p, scale)
    *_, probabilities, kept = context.saved_tensors
    assert probabilities is not None
    return out, probabilities, probabilities.new_empty(0, dtype=torch.uint8) if kept is None else kept


@torch.library.register_fake(f"{NAMESPACE}::attention")  # type: ignore[untyped-decorator]
def _attention_like(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.new_empty(query.shape[:-2]).numel()
    shape = (rows, query.size(-2), key.size(-2))
    kept = query.new_empty(shape if dropout_p else (0,), dtype=torch.uint8)
    return query.new_empty((*query.shape[:-1], value.size(-1))), query.new_empty(shape), kept


@torch.library.impl(f"{NAMESPACE}::attention_backward", "CPU")
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    kept: Tensor,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flat = (each.reshape(-1, *each.shape[-2:]) for each in (query, key, value))
    context = Context(
        saved_tensors=(*flat, probabilities, kept if dropout_p else None),
        shapes=(query.shape, key.shape, value.shape),
        dropout_p=dropout_p,
        scale=scale,
    )
    found: Any = plain_attention._Attention.backward(context, gradient)
    return found[0], found[1], found[2]


@torch.library.register_fake(f"{NAMESPACE}::attention_backward")  # type: ignore[untyped-decorator]
def _attention_backward_like(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, ctx.dropout_p, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, *output[1:])


def _differentiate_attention(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.nano_loop.attention_backward(gradient, *ctx.saved_tensors, ctx.dropout_p, ctx.scale)
    return *found, None, None, None, None


torch.library.register_autograd(f"{NAMESPACE}::attention", _differentiate_attention, setup_context=_save_attention)
