"""Attention by torch operators: where they are faster, or where a derivative of a C function is needed."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.patching.torch_private import safe_softmax


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
    """Compute attention by torch's operators: individual ones if a dropout mask is given.

    Otherwise, torch chooses a kernel, not all of which have a second derivative. For the parameters, see
    `nano_loop.kernels.attention.blocked_attention.blocked_attention`.
    """
    grouped = query.shape[:-2] != key.shape[:-2]
    if kept is None or dropout_p == 1:
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
    query, key, value = query.float(), key.float(), value.float()
    if grouped:
        count = query.size(-3) // key.size(-3)
        key, value = (tensor.repeat_interleave(count, dim=-3) for tensor in (key, value))
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    scores = query @ key.mT * scale
    if mask is not None:
        if mask.dtype is torch.bool:  # torch adds a float mask, which preserves NaN
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
        scores = scores + mask
    probabilities = safe_softmax(scores)
    return kept.view(scores.shape).to(probabilities.dtype).mul_(probabilities).div_(1 - dropout_p) @ value
