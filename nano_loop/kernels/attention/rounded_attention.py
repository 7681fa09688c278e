"""Attention of fp32 tensors whose products round their inputs, by `nano_loop.kernels.attention.blocked_attention`.

It replaces the two kernels of torch's flash attention on the CPU, below autograd. Where torch computes attention by
single products instead, as with a dropout, these are rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.replacement import Replacement, unless_none
from nano_loop.kernels.rounding import ATTENTION, is_large, note, rounds_products
from nano_loop.patching.torch_private import FLASH_KERNEL

_DIMENSIONS = 4  # batch, heads, rows, columns


def _forward(
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
    if dropout_p or not _is_ours(query, key, value, attn_mask):
        return None
    out = blocked_attention.laid_out_as(query, value.size(-1))
    return blocked_attention.forward(*_arguments(query, key, value, attn_mask, is_causal, scale), out)


def _backward(
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
    if dropout_p or not _is_ours(query, key, value, attn_mask):
        return None
    gradients = [blocked_attention.laid_out_as(tensor) for tensor in (query, key, value)]
    arguments = _arguments(query, key, value, attn_mask, is_causal, scale)
    blocked_attention.backward(_rounded(grad_out), logsumexp.contiguous(), *arguments, gradients)
    return tuple(gradients)


REPLACEMENTS = (
    Replacement(FLASH_KERNEL, unless_none(_forward)),
    Replacement(f"{FLASH_KERNEL}_backward", unless_none(_backward)),
)


def _is_ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    tensors = (query, key, value)
    if query.dim() != _DIMENSIONS or any(tensor.dim() != _DIMENSIONS for tensor in tensors):
        return False
    scores = math.prod(query.shape[:-1]) * key.size(-2)
    multiplications = scores * (query.size(-1) + value.size(-1))
    if not is_large(ATTENTION, multiplications) or not rounds_products():
        return False
    if not all(_is_plain(tensor) for tensor in (*tensors, mask) if tensor is not None):
        return False
    if query.size(0) != key.size(0) or query.size(1) % key.size(1) or key.shape[:-1] != value.shape[:-1]:
        return False
    if query.size(-1) != key.size(-1) or not blocked_attention.supports(query, key, value):
        return False
    note(ATTENTION, multiplications)
    return True


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype is torch.float32 and tensor.data_ptr() != 0


def _rounded(tensor: Tensor) -> Tensor:
    return blocked_attention.with_columns(tensor.bfloat16())


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, float, bool, float]:
    """Return the arguments of the kernel, from `query` to `scale`."""
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    number = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    return _rounded(query), _rounded(key), _rounded(value), mask, None, 0.0, is_causal, number
