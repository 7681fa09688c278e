"""Attention by plain matrix products, for bf16 on the CPU.

Scores are computed and normalized in fp32, and the probabilities are kept in bf16 for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nano_loop.kernels.replacement import operator_of
from nano_loop.patching.torch_private import is_batched, softmax_backward

#: Maximum size of the probabilities of one call, in bytes.
MEMORY_BOUND = 256 * 2**20


def supports(query: Tensor, key: Tensor) -> bool:
    """Whether the probabilities are small enough to be kept."""
    return math.prod(query.shape[:-1]) * key.size(-2) <= MEMORY_BOUND // query.element_size()


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """Compute softmax(query keyᵀ · scale + mask) value, with dropout on the softmax.

    Parameters and the output's shape are those of `nano_loop.kernels.attention.blocked_attention.blocked_attention`.
    """
    out: Tensor = _Attention.apply(*for_all_heads(query, key, value, mask, is_causal), dropout_p, scale)  # type: ignore[no-untyped-call]
    return out


def for_all_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key, value and mask with keys for each head of the query, and with a mask that makes it causal."""
    if key.shape[:-2] != query.shape[:-2]:
        key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    return query, key, value, mask


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.size(-3) // tensor.size(-3), dim=-3)


class _Attention(torch.autograd.Function):
    """softmax(query keyᵀ · scale + mask) value, with dropout on the softmax."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float
    ) -> Tensor:
        flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value)]
        q, k, v = flat
        nothing = q.new_empty((1, 1, 1), dtype=torch.float32)
        scores = torch.baddbmm(nothing, q.float(), k.float().transpose(1, 2), beta=0, alpha=scale)
        probabilities = _softmax(scores.view(*query.shape[:-1], key.size(-2)), mask).to(q.dtype).view_as(scores)
        kept = torch.empty_like(probabilities, dtype=torch.uint8).bernoulli_(1 - dropout_p) if dropout_p else None
        out = torch.bmm(_dropped(probabilities, kept, dropout_p), v)
        ctx.save_for_backward(q, k, v, probabilities, kept)
        ctx.shapes, ctx.dropout_p, ctx.scale = (query.shape, key.shape, value.shape), dropout_p, scale
        return out.view(*query.shape[:-1], value.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        compute: Callable[..., Any] = _GRADIENTS if is_batched(gradient) else _gradients
        gradients = zip(compute(gradient, *ctx.saved_tensors, ctx.dropout_p, ctx.scale), ctx.shapes, strict=True)
        return *(computed.view(shape) for computed, shape in gradients), None, None, None


def _gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    probabilities: Tensor,
    kept: Tensor | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, of three dimensions."""
    gradient = gradient.reshape(q.size(0), q.size(1), v.size(2))
    of_value = torch.bmm(_dropped(probabilities, kept, dropout_p).transpose(1, 2), gradient)
    of_probabilities = _dropped(torch.bmm(gradient, v.transpose(1, 2)), kept, dropout_p)
    of_scores = softmax_backward(of_probabilities, probabilities)
    return torch.bmm(of_scores, k).mul_(scale), torch.bmm(of_scores.transpose(1, 2), q).mul_(scale), of_value


_GRADIENTS = operator_of(
    "plain_attention_gradients",
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor probabilities, Tensor? kept, float dropout_p, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    _gradients,
)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension, and overwrite `scores`. A fully masked row becomes zero."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype is torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    else:
        scores.add_(mask)
    probabilities = scores.softmax(-1)
    masked_out = scores.amax(-1, keepdim=True) == -math.inf
    return probabilities.masked_fill_(masked_out, 0.0)


def _dropped(tensor: Tensor, kept: Tensor | None, dropout_p: float) -> Tensor:
    """Apply the dropout mask, and rescale the kept elements."""
    if kept is None:
        return tensor
    return kept.to(tensor.dtype).mul_(tensor).div_(1 - dropout_p) if dropout_p < 1 else torch.zeros_like(tensor)
