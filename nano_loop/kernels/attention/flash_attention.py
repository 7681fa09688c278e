"""Attention of fp32 tensors: torch's two kernels of flash attention on the CPU are replaced, below autograd.

Where products round their inputs to bf16, `nano_loop.kernels.attention.blocked_attention` computes; where they round to
fp16's numbers, torch's kernel does, from rounded tensors; else `nano_loop.kernels.attention.fp32_attention` does, where
that is faster. Where torch computes attention by single products instead, as with a dropout, these round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention, fp32_attention
from nano_loop.kernels.memory import is_plain
from nano_loop.kernels.override import COMPILED, FP32, ROUNDED, TORCH, Algorithm, Call, Override
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.torch_private import FLASH_KERNEL
from nano_loop.policy import product_precision
from nano_loop.policy.product_precision import ATTENTION

_DIMENSIONS = 4  # batch, heads, rows, columns


class _Details(NamedTuple):
    """What forward and backward need besides their tensors, which are the factors, the gradient first, and the mask."""

    is_causal: bool
    scale: float
    #: The factor of the scores as the program has passed it.
    given_scale: float | None
    #: In a backward, what the forward has returned.
    outs: tuple[Tensor, ...] = ()


def _forward(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Call | None:
    details = _Details(is_causal, blocked_attention.scale_of(query, scale), scale)
    return None if dropout_p else _call(ATTENTION, kernel, (query, key, value, attn_mask), details)


def _backward(
    kernel: Kernel,
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
) -> Call | None:
    details = _Details(is_causal, blocked_attention.scale_of(query, scale), scale, (out, logsumexp))
    tensors = grad_out, query, key, value, attn_mask
    return None if dropout_p else _call(f"gradients of {ATTENTION}", kernel, tensors, details)


def _call(name: str, kernel: Kernel, tensors: tuple[Any, ...], details: _Details) -> Call | None:
    query, key, value, _ = tensors[-4:]
    if any(tensor.dim() != _DIMENSIONS for tensor in (query, key, value)):
        return None
    multiplications = math.prod(query.shape[:-1]) * key.size(-2) * (query.size(-1) + value.size(-1))
    if multiplications < min(fp32_attention.MIN_MULTIPLICATIONS, product_precision.MIN_MULTIPLICATIONS[ATTENTION]):
        return None
    return Call(name, tensors, (details.is_causal,), kernel, multiplications, details)


def _by_torch(call: Call) -> Any:
    (*factors, mask), details = call.tensors, call.details
    assert call.kernel is not None
    scale = details.given_scale
    return call.kernel(*factors, *details.outs, 0.0, details.is_causal, attn_mask=mask, scale=scale)


def _rounded(call: Call) -> tuple[Tensor, Tensor]:
    query, _, value, _ = call.tensors
    arguments: tuple[Any, ...] = (*_narrow(call), blocked_attention.laid_out_as(query, value.size(-1)))
    return blocked_attention.forward(*arguments)


def _gradients_rounded(call: Call) -> tuple[Tensor, ...]:
    gradient, *narrow = _narrow(call)
    gradients = [blocked_attention.laid_out_as(tensor) for tensor in call.tensors[1:4]]
    arguments: tuple[Any, ...] = (gradient, call.details.outs[1].contiguous(), *narrow, gradients)
    blocked_attention.backward(*arguments)
    return tuple(gradients)


def _narrow(call: Call) -> tuple[Any, ...]:
    """Return the factors in bf16 and the other arguments of `blocked_attention.forward` and its backward."""
    *factors, mask = call.tensors
    query, key, _ = factors[-3:]
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    narrow = [blocked_attention.with_columns(tensor.bfloat16()) for tensor in factors]
    return *narrow, mask, None, 0.0, call.details.is_causal, call.details.scale


def _compiled(function: Callable[..., Any], call: Call) -> Any:
    return function(*call.tensors, call.details.is_causal, call.details.scale)


def _supports_rounding(call: Call) -> bool:
    """Whether attention is computed in blocks from these tensors, rounded to bf16."""
    query, key, value, mask = call.tensors[-4:]
    if query.size(0) != key.size(0) or key.shape[:-1] != value.shape[:-1] or query.size(-1) != key.size(-1):
        return False
    if not all(is_plain(tensor, (torch.float32,)) for tensor in (query, key, value, mask) if tensor is not None):
        return False
    return blocked_attention.share_heads(query, key) and blocked_attention.supports(query, key, value)


OVERRIDES = tuple(
    Override(
        operator,
        (
            Algorithm(ROUNDED, rounded, FP32, is_exact=False, supports=_supports_rounding),
            Algorithm(
                COMPILED,
                functools.partial(_compiled, compiled),
                FP32,
                supports=lambda call: fp32_attention.supports(*call.tensors[-4:]),
                kernel=fp32_attention.KERNEL.name,
            ),
        ),
        supports,
        lambda call: TORCH,
        _by_torch,
        product=ATTENTION,
        factors=factors,
    )
    for operator, supports, rounded, compiled, factors in (
        (FLASH_KERNEL, _forward, _rounded, fp32_attention.forward, 3),
        (f"{FLASH_KERNEL}_backward", _backward, _gradients_rounded, fp32_attention.backward, 4),
    )
)
