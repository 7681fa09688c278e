"""Attention by plain matrix products, for bf16 on the CPU.

torch's CPU kernel ("flash") works in blocks and never materializes all probabilities, but its small bf16 products run
at a fifth of the speed of oneDNN's large ones. Here, scores are computed and normalized in fp32, and the probabilities
are kept in bf16 for the backward. The error against fp64 is close to that of torch's kernel (docs/performance.md has
both errors and the times).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.intercept.ownership import belongs_to_set_up_model
from nano_loop.intercept.torch_private import in_functorch, softmax_backward

#: Maximum size of the probabilities of one call, in bytes. Above it, torch's kernel runs, which does not store them.
MEMORY_BOUND = 256 * 2**20
#: Minimum number of scores. Below it, the Python overhead exceeds the gain.
WORTH_IT = 1 << 14
#: Minimum head size. With smaller heads there is no gain, and torch's kernel is more accurate.
_WIDTH_WORTH_IT = 16


def for_set_up_models(original: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """Return the replacement of the autocast kernel of ``aten::scaled_dot_product_attention``.

    Calls that do not belong to a set-up model return torch's own result, bitwise identical.

    Parameters
    ----------
    original : callable or None
        The original kernel. None if torch does not return it; `attention` then calls torch's function.
    """

    def dispatched(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Tensor:
        ours = belongs_to_set_up_model()
        if ours or original is None:
            return attention(*args, **kwargs, plain_products=ours)
        return original(keys, *args, **kwargs)

    return dispatched


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    plain_products: bool = True,
    traced_as: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute what `torch.nn.functional.scaled_dot_product_attention` does under bf16 autocast.

    Parameters
    ----------
    query : torch.Tensor
        Of shape (..., heads, L, E) and any floating dtype.
    key, value : torch.Tensor
        Of shapes (..., heads, S, E) and (..., heads, S, Ev).
    attn_mask, dropout_p, is_causal, scale, enable_gqa
        As in torch.
    plain_products : bool
        If False, torch's kernel computes the result.
    traced_as : callable, optional
        What torch traces in place of the kernel, with its arguments. Without it, traced code has torch's kernel.

    Returns
    -------
    torch.Tensor
        Of shape (..., heads, L, Ev), in autocast's dtype. It can be differentiated once, like torch's kernel.
    """
    dtype = torch.get_autocast_dtype("cpu")
    query, key, value = (_cast(tensor, dtype) for tensor in (query, key, value))
    mask = None if attn_mask is None else _cast(attn_mask, dtype)
    # Autocast is disabled, since it would cast the products of fp32 scores to bf16.
    with torch.autocast("cpu", enabled=False):
        supported = traced_as is not None or not _is_traced(query, key, value)
        if not (plain_products and supported and _fits(query, key, value, mask, is_causal, enable_gqa)):
            return scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
        if is_causal:
            mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
        scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        compute: Callable[..., Tensor] = traced_as or _Attention.apply
        return compute(query, key, value, mask, dropout_p, scale)


def _is_traced(*tensors: Tensor) -> bool:
    return torch.compiler.is_compiling() or any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast like autocast, which does not change bool and float64 masks."""
    return tensor.to(dtype) if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else tensor


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether plain products support the call and are faster. torch handles all other calls, and all errors."""
    tensors = (query, key, value)
    # A user who disables torch's flash kernel with `sdpa_kernel` may need a second derivative, as its math kernel has.
    if in_functorch() or not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if any(each.dtype is not torch.bfloat16 or each.dim() < 3 or each.layout is not torch.strided for each in tensors):
        return False
    if mask is not None and (is_causal or mask.requires_grad or mask.dtype not in (torch.bool, torch.bfloat16)):
        return False
    heads = -3 if enable_gqa else -2
    if not query.shape[:heads] == key.shape[:heads] == value.shape[:heads] or key.shape[-3:-1] != value.shape[-3:-1]:
        return False
    if query.size(-1) != key.size(-1) or (enable_gqa and query.size(-3) % key.size(-3)):
        return False
    scores = math.prod(query.shape[:-1]) * key.size(-2)
    wide = min(query.size(-1), value.size(-1)) >= _WIDTH_WORTH_IT
    return wide and WORTH_IT <= scores <= MEMORY_BOUND // query.element_size()


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
        q, k, v, probabilities, kept = ctx.saved_tensors
        gradient = gradient.reshape(q.size(0), q.size(1), v.size(2))
        of_value = torch.bmm(_dropped(probabilities, kept, ctx.dropout_p).transpose(1, 2), gradient)
        of_probabilities = _dropped(torch.bmm(gradient, v.transpose(1, 2)), kept, ctx.dropout_p)
        of_scores = softmax_backward(of_probabilities, probabilities)
        of_query = torch.bmm(of_scores, k).mul_(ctx.scale)
        of_key = torch.bmm(of_scores.transpose(1, 2), q).mul_(ctx.scale)
        found = zip((of_query, of_key, of_value), ctx.shapes, strict=True)
        return *(each.view(shape) for each, shape in found), None, None, None


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
