"""The operators of attention in blocks, `nano_loop.kernels.blocked_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.compiling.operators.library import DRAWS, NAMESPACE
from nano_loop.kernels import blocked_attention

torch.library.define(
    f"{NAMESPACE}::blocked_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, float scale, int number) "
    "-> (Tensor, Tensor, Tensor)",
    tags=DRAWS,
)
torch.library.define(
    f"{NAMESPACE}::blocked_attention_backward",
    "(Tensor gradient, Tensor log_sums, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor kept, "
    "float dropout_p, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(f"{NAMESPACE}::blocked_attention", "CPU")
def _blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    number: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `nano_loop.kernels.blocked_attention`, and what its backward needs."""
    kept = torch.empty((*query.shape[:-1], key.size(-2)) if dropout_p else (0,), dtype=torch.uint8)
    if dropout_p:
        kept.bernoulli_(1 - dropout_p)
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    query, key, value = (blocked_attention.with_columns(each) for each in (query, key, value))
    drawn = kept if dropout_p else None
    return *blocked_attention.forward(query, key, value, mask, drawn, dropout_p, is_causal, scale), kept


@torch.library.register_fake(f"{NAMESPACE}::blocked_attention")  # type: ignore[untyped-decorator]
def _blocked_attention_like(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kept = query.new_empty((*query.shape[:-1], key.size(-2)) if dropout_p else (0,), dtype=torch.uint8)
    log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _by_rows(query, (*query.shape[:-1], value.size(-1))), log_sums, kept


@torch.library.impl(f"{NAMESPACE}::blocked_attention_backward", "CPU")
def _blocked_attention_backward(
    gradient: Tensor,
    log_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    gradient, query, key, value = (blocked_attention.with_columns(each) for each in (gradient, query, key, value))
    found = _by_rows(query, query.shape), _by_rows(key, key.shape), _by_rows(value, value.shape)
    blocked_attention.backward(
        gradient, log_sums, query, key, value, mask, kept if dropout_p else None, dropout_p, is_causal, scale, found
    )
    return found


@torch.library.register_fake(f"{NAMESPACE}::blocked_attention_backward")  # type: ignore[untyped-decorator]
def _blocked_attention_backward_like(
    gradient: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return tuple(_by_rows(each, each.shape) for each in (query, key, value))


def _by_rows(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor in which the heads of a row lie side by side."""
    batch, heads, rows, columns = shape
    return tensor.new_empty((batch, rows, heads, columns)).transpose(1, 2)


def _save_blocked_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mask, *ctx.numbers, _ = inputs
    _, log_sums, kept = output
    ctx.mark_non_differentiable(log_sums, kept)
    ctx.save_for_backward(log_sums, query, key, value, mask, kept)


def _differentiate_blocked_attention(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.nano_loop.blocked_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, *[None] * 5


torch.library.register_autograd(
    f"{NAMESPACE}::blocked_attention", _differentiate_blocked_attention, setup_context=_save_blocked_attention
)
