"""Attention by plain matrix products, for bf16 on the CPU.

Scores are computed and normalized in fp32, and the probabilities are kept in bf16 for the backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.kernels.double_backward import gradients_of
from nano_loop.patching.torch_private import safe_softmax, softmax_backward

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
    shape, columns = query.shape[:-1], value.size(-1)
    *tensors, mask = for_all_heads(query, key, value, mask, is_causal)
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in tensors]
    out: Tensor = _Attention.apply(*flat, mask, shape, dropout_p, scale)  # type: ignore[no-untyped-call]
    return out.view(*shape, columns)


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


def by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute attention by torch's operators, which are single ones where there is a mask of the dropout.

    Without that, torch chooses its kernel, of which not every one has a second derivative.
    """
    if kept is None or dropout_p == 1:
        grouped = query.shape[:-2] != key.shape[:-2]
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
    query, key, value, mask = for_all_heads(query.float(), key.float(), value.float(), mask, is_causal)
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return _dropped(safe_softmax(scores), kept.view(scores.shape), dropout_p) @ value


class _Attention(torch.autograd.Function):
    """softmax(query keyᵀ · scale + mask) value of three dimensions, with dropout on the softmax; `shape` has more."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: Any, dropout_p: float, scale: float
    ) -> Tensor:
        nothing = q.new_empty((1, 1, 1), dtype=torch.float32)
        scores = torch.ops.aten.baddbmm(nothing, q.float(), k.float().transpose(1, 2), beta=0, alpha=scale)
        probabilities = _softmax(scores.view(*shape, k.size(1)), mask).to(q.dtype).view_as(scores)
        kept = torch.empty_like(probabilities, dtype=torch.uint8).bernoulli_(1 - dropout_p) if dropout_p else None
        ctx.save_for_backward(q, k, v, mask, probabilities, kept)
        ctx.numbers = shape, dropout_p, scale
        out: Tensor = torch.ops.aten.bmm(_dropped(probabilities, kept, dropout_p), v)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, probabilities, kept = ctx.saved_tensors
        shape, dropout_p, scale = ctx.numbers

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            return _gradients(gradient, q, k, v, probabilities, kept, dropout_p, scale)

        def in_heads(*tensors: Tensor) -> Tensor:
            query, key, value = (tensor.view(*shape[:-1], *tensor.shape[1:]) for tensor in tensors)
            return by_torch(query, key, value, mask, dropout_p, False, scale, kept).reshape(gradient.shape)

        return gradients_of(ctx, (q, k, v), (gradient,), compute, in_heads)


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
    of_value = torch.ops.aten.bmm(_dropped(probabilities, kept, dropout_p).transpose(1, 2), gradient)
    of_probabilities = _dropped(torch.ops.aten.bmm(gradient, v.transpose(1, 2)), kept, dropout_p)
    of_scores = softmax_backward(of_probabilities, probabilities)
    return (
        torch.ops.aten.bmm(of_scores, k).mul_(scale),
        torch.ops.aten.bmm(of_scores.transpose(1, 2), q).mul_(scale),
        of_value,
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
