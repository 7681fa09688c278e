"""Attention of fp32 tensors whose products round their inputs, by `nano_loop.kernels.attention.blocked_attention`.

To fp16's numbers, query, key, value and the output's gradient are rounded, and torch's kernel for fp32 computes.

It replaces the two kernels of torch's flash attention on the CPU, below autograd. Where torch computes attention by
single products instead, as with a dropout, these are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention, fp32_attention
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.patching.torch_private import FLASH_KERNEL
from nano_loop.policy.policy import ATTENTION
from nano_loop.policy.products import Arguments, dtype_of, in_fp16, rounds

_DIMENSIONS = 4  # batch, heads, rows, columns


def _forward(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return the output, and the logarithm of the sum of each row, or None where torch has to compute."""
    if dropout_p:
        return None
    multiplications = _multiplications(query, key, value)
    factors = in_fp16(ATTENTION, multiplications, query, key, value)
    if factors is not None:
        result: tuple[Tensor, Tensor] = kernel(*factors, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
        return result
    if not _may_be_rounded(query, key, value, attn_mask, multiplications):
        return fp32_attention.forward_if_faster(kernel, query, key, value, attn_mask, is_causal, scale)

    def rounded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = _rounded(query), _rounded(key), _rounded(value)
        mask = None if attn_mask is None else blocked_attention.as_mask(attn_mask, query, key)
        out, number = blocked_attention.laid_out_as(query, value.size(-1)), blocked_attention.scale_of(query, scale)
        return blocked_attention.forward(q, k, v, mask, None, 0.0, is_causal, number, out)

    def in_fp32(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Any:
        return kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)

    tensors = query, key, value, attn_mask
    is_rounded = rounds(ATTENTION, multiplications, Arguments(ATTENTION, tensors, (is_causal,)), in_fp32, rounded)
    if is_rounded:
        return rounded(*tensors)
    return fp32_attention.forward_if_faster(kernel, *tensors, is_causal, scale)


def _backward(
    kernel: Callable[..., Any],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...] | None:
    """Return the gradients of query, key and value, or None where torch has to compute."""
    if dropout_p:
        return None
    multiplications, others = _multiplications(query, key, value), (out, logsumexp, attn_mask, is_causal, scale)
    factors = in_fp16(ATTENTION, multiplications, grad_out, query, key, value)
    if factors is not None:
        result: tuple[Tensor, ...] = kernel(
            *factors, out, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
        return result
    if not _may_be_rounded(query, key, value, attn_mask, multiplications):
        return fp32_attention.backward_if_faster(kernel, grad_out, query, key, value, *others)

    def rounded(*tensors: Any) -> tuple[Tensor, ...]:
        gradient, q, k, v = map(_rounded, tensors[:4])
        mask = None if attn_mask is None else blocked_attention.as_mask(attn_mask, query, key)
        gradients = [blocked_attention.laid_out_as(tensor) for tensor in (query, key, value)]
        log_sums, number = logsumexp.contiguous(), blocked_attention.scale_of(query, scale)
        blocked_attention.backward(gradient, log_sums, q, k, v, mask, None, 0.0, is_causal, number, gradients)
        return tuple(gradients)

    def in_fp32(*tensors: Any) -> Any:
        return kernel(*tensors[:-1], out, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale)

    tensors = grad_out, query, key, value, attn_mask
    call = Arguments(f"gradients of {ATTENTION}", tensors, (is_causal,))
    if rounds(ATTENTION, multiplications, call, in_fp32, rounded):
        return rounded(*tensors)
    return fp32_attention.backward_if_faster(kernel, grad_out, query, key, value, *others)


REPLACEMENTS = (
    Replacement(FLASH_KERNEL, unless_none(_forward)),
    Replacement(f"{FLASH_KERNEL}_backward", unless_none(_backward)),
)


def _multiplications(query: Tensor, key: Tensor, value: Tensor) -> int:
    if any(tensor.dim() != _DIMENSIONS for tensor in (query, key, value)):
        return 0
    return math.prod(query.shape[:-1]) * key.size(-2) * (query.size(-1) + value.size(-1))


def _may_be_rounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, multiplications: int) -> bool:
    tensors = (query, key, value)
    if dtype_of(ATTENTION, multiplications) is not torch.bfloat16:
        return False
    if not all(_is_plain(tensor) for tensor in (*tensors, mask) if tensor is not None):
        return False
    if query.size(0) != key.size(0) or key.shape[:-1] != value.shape[:-1]:
        return False
    if not blocked_attention.share_heads(query, key):
        return False
    return query.size(-1) == key.size(-1) and blocked_attention.supports(query, key, value)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype is torch.float32 and tensor.data_ptr() != 0


def _rounded(tensor: Tensor) -> Tensor:
    return blocked_attention.with_columns(tensor.bfloat16())
