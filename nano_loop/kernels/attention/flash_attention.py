"""Attention of fp32 tensors: torch's two kernels of flash attention on the CPU are replaced, below autograd.

Where products round their inputs to bf16, `nano_loop.kernels.attention.blocked_attention` computes; where they round to
fp16's numbers, torch's kernel does, from rounded tensors; else `nano_loop.kernels.attention.fp32_attention` does, where
that is faster. Where torch computes attention by single products instead, as with a dropout, these round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention, fp32_attention
from nano_loop.kernels.fp16 import in_fp16
from nano_loop.kernels.fp32 import COMPILED, TORCH, is_compiled
from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.kernels.replacement import Arguments, Replacement, unless_none
from nano_loop.patching.ownership import rule_for
from nano_loop.patching.torch_private import FLASH_KERNEL
from nano_loop.policy.policy import ATTENTION
from nano_loop.policy.products import dtype_of, rounds

_DIMENSIONS = 4  # batch, heads, rows, columns


class _Attention(NamedTuple):
    """What forward and backward have in common."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    @property
    def multiplications(self) -> int:
        """The number of multiplications of a forward."""
        query, key, value = self[:3]
        if any(tensor.dim() != _DIMENSIONS for tensor in (query, key, value)):
            return 0
        return math.prod(query.shape[:-1]) * key.size(-2) * (query.size(-1) + value.size(-1))

    def supports_rounding(self) -> bool:
        """Whether attention is computed in blocks from these tensors, rounded to bf16."""
        query, key, value, mask, *_ = self
        if query.size(0) != key.size(0) or key.shape[:-1] != value.shape[:-1] or query.size(-1) != key.size(-1):
            return False
        if not all(is_plain(tensor, (torch.float32,)) for tensor in (query, key, value, mask) if tensor is not None):
            return False
        return blocked_attention.share_heads(query, key) and blocked_attention.supports(query, key, value)

    def as_rounded(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return tensors in bf16 and the other arguments of `blocked_attention.forward` and its backward."""
        mask = None if self.mask is None else blocked_attention.as_mask(self.mask, self.query, self.key)
        narrow = [blocked_attention.with_columns(tensor.bfloat16()) for tensor in tensors]
        return *narrow, mask, None, 0.0, self.is_causal, self.scale


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
    call = _Attention(query, key, value, attn_mask, is_causal, blocked_attention.scale_of(query, scale))

    def by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        return kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)

    def rounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out = blocked_attention.laid_out_as(query, value.size(-1))
        arguments: tuple[Any, ...] = (*call.as_rounded(query, key, value), out)
        return blocked_attention.forward(*arguments)

    def in_c(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return fp32_attention.forward(query, key, value, mask, is_causal, call.scale)

    computed: tuple[Tensor, Tensor] | None = None
    if not dropout_p:
        computed = _computed(ATTENTION, call, (query, key, value), by_torch, rounded, in_c)
    return computed


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
    call = _Attention(query, key, value, attn_mask, is_causal, blocked_attention.scale_of(query, scale))

    def by_torch(*tensors: Any) -> Any:
        return kernel(*tensors[:-1], out, logsumexp, 0.0, is_causal, attn_mask=tensors[-1], scale=scale)

    def rounded(*tensors: Any) -> tuple[Tensor, ...]:
        gradient, *narrow = call.as_rounded(*tensors[:-1])
        gradients = [blocked_attention.laid_out_as(tensor) for tensor in (query, key, value)]
        arguments: tuple[Any, ...] = (gradient, logsumexp.contiguous(), *narrow, gradients)
        blocked_attention.backward(*arguments)
        return tuple(gradients)

    def in_c(*tensors: Any) -> tuple[Tensor, ...]:
        arguments: tuple[Any, ...] = (*tensors, is_causal, call.scale)
        return fp32_attention.backward(*arguments)

    computed: tuple[Tensor, ...] | None = None
    if not dropout_p:
        tensors = grad_out, query, key, value
        computed = _computed(f"gradients of {ATTENTION}", call, tensors, by_torch, rounded, in_c)
    return computed


REPLACEMENTS = (
    Replacement(FLASH_KERNEL, unless_none(_forward)),
    Replacement(f"{FLASH_KERNEL}_backward", unless_none(_backward)),
)


def _computed(
    name: str,
    call: _Attention,
    factors: tuple[Tensor, ...],
    by_torch: Callable[..., Any],
    rounded: Callable[..., Any],
    in_c: Callable[..., Any],
) -> Any:
    """Return what one of the algorithms computes, which take the factors and the mask, or None for torch's kernel."""
    multiplications = call.multiplications
    in_fp16s_numbers = in_fp16(ATTENTION, multiplications, *factors)
    if in_fp16s_numbers is not None:
        return by_torch(*in_fp16s_numbers, call.mask)
    tensors = (*factors, call.mask)
    arguments = Arguments(name, tensors, (call.is_causal,))
    may_round = dtype_of(ATTENTION, multiplications) is torch.bfloat16 and call.supports_rounding()
    if may_round and rounds(ATTENTION, multiplications, arguments, by_torch, rounded):
        return rounded(*tensors)
    rule = rule_for(fp32_attention.RULE)
    if rule is None or not fp32_attention.supports(*call[:4]):
        return None
    algorithms = {TORCH: by_torch, COMPILED: in_c}
    return attempt(in_c, *tensors) if is_compiled(rule, arguments, lambda: algorithms, TORCH) else None
