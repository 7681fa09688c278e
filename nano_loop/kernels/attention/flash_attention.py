"""Attention of fp32 tensors: replaces torch's two flash attention kernels on the CPU, below autograd.

If products round their inputs to bf16, `nano_loop.kernels.attention.blocked_attention` computes. If they round to fp16,
torch's kernel computes from rounded tensors. Otherwise, a C function (``fp32_attention.c``) is used where it is faster:
torch's kernel uses MKL for its products, which uses AVX-512 on Intel CPUs only. If torch composes attention of
individual products, as with dropout, these round.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels import memory, narrow_copies, override
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.attention.blocked_attention import Inputs
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import is_plain
from nano_loop.kernels.override import BF16, COMPILED, FP32, ROUNDED, TORCH, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.torch_private import FLASH_KERNEL
from nano_loop.policy import product_precision
from nano_loop.policy.product_precision import ATTENTION

KERNEL = blocked_attention.kernel_of("fp32_attention", memory.FP32, memory.FP32, torch.float32, is_bf16=False)
#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 20
_DIMENSIONS = 4  # batch, heads, rows, columns


class _Details(NamedTuple):
    """Data for forward and backward in addition to the tensors: the factors (gradient first) and the mask."""

    is_causal: bool
    scale: float
    #: The results of the forward, for a backward.
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
    details = _Details(is_causal, blocked_attention.scale_of(query, scale))
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
    details = _Details(is_causal, blocked_attention.scale_of(query, scale), (out, logsumexp))
    tensors = grad_out, query, key, value, attn_mask
    return None if dropout_p else _call(f"gradients of {ATTENTION}", kernel, tensors, details)


def _call(name: str, kernel: Kernel, tensors: tuple[Any, ...], details: _Details) -> Call | None:
    query, key, value, _ = tensors[-4:]
    if any(tensor.dim() != _DIMENSIONS for tensor in (query, key, value)):
        return None
    multiplications = math.prod(query.shape[:-1]) * key.size(-2) * (query.size(-1) + value.size(-1))
    if multiplications < min(MIN_MULTIPLICATIONS, product_precision.MIN_MULTIPLICATIONS[ATTENTION]):
        return None
    return Call(name, tensors, (details.is_causal,), kernel, multiplications, details)


def _by_torch(call: Call) -> Any:
    (*factors, mask), details = call.tensors, call.details
    assert call.kernel is not None
    tensors = override.in_fp32((*factors, *details.outs))
    return call.kernel(*tensors, 0.0, details.is_causal, attn_mask=mask, scale=details.scale)


def _in_c(kernel: CompiledKernel, call: Call) -> tuple[Tensor, ...]:
    """Compute attention or its gradients, from factors in the kernel's dtype."""
    (*factors, mask), details = call.tensors, call.details
    dtype = torch.float32 if kernel is KERNEL else torch.bfloat16
    rounds = dtype is torch.bfloat16 and not details.outs
    inputs_in_dtype = [narrow_copies.rounded(tensor) if rounds else tensor.to(dtype) for tensor in factors]
    *gradient, query, key, value = map(blocked_attention.with_columns, inputs_in_dtype)
    mask = None if mask is None else blocked_attention.as_mask(mask, query, key)
    inputs = Inputs(query, key, value, mask, is_causal=details.is_causal, scale=details.scale)
    if not details.outs:
        return blocked_attention.forward(kernel, inputs, blocked_attention.laid_out_as(factors[0], value.size(-1)))
    gradients = [blocked_attention.laid_out_as(tensor, dtype=factors[0].dtype) for tensor in factors[1:]]
    blocked_attention.backward(kernel, inputs, gradient[0], details.outs[1].contiguous(), gradients)
    return tuple(gradients)


def _supports_rounding(call: Call) -> bool:
    """Whether attention can be computed in blocks from these tensors, rounded to bf16."""
    query, key, value, mask = call.tensors[-4:]
    factor_dtypes = (*FP32, *BF16) if call.details.outs else FP32  # a backward may get bf16 copies
    if query.size(0) != key.size(0) or key.shape[:-1] != value.shape[:-1] or query.size(-1) != key.size(-1):
        return False
    if not all(is_plain(tensor, factor_dtypes) for tensor in (query, key, value)):
        return False
    if not all(is_plain(tensor, FP32) for tensor in (call.tensors[0], mask) if tensor is not None):
        return False
    return blocked_attention.share_heads(query, key) and blocked_attention.supports(query, key, value)


def _supports_fp32(call: Call) -> bool:
    """Whether the fp32 function supports these tensors and may be faster than torch's kernel."""
    query, key, value, mask = call.tensors[-4:]
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    if key.shape != value.shape or (*query.shape[:2], query.size(3)) != (*key.shape[:2], key.size(3)):
        return False
    if query.numel() * key.size(2) < MIN_MULTIPLICATIONS or (mask is not None and mask.requires_grad):
        return False
    return KERNEL.unavailable is None and blocked_attention.fits(KERNEL, query, key, value)


_ROUNDED = Algorithm(
    *(ROUNDED, functools.partial(_in_c, blocked_attention.KERNEL), FP32), is_exact=False, supports=_supports_rounding
)
_COMPILED = Algorithm(*(COMPILED, functools.partial(_in_c, KERNEL), FP32), supports=_supports_fp32, kernel=KERNEL.name)
_BACKWARD = f"{FLASH_KERNEL}_backward"
OVERRIDES = tuple(
    Override(
        *(operator, (_ROUNDED, _COMPILED), supports, lambda call: TORCH, _by_torch),
        product=ATTENTION,
        factors=factors,
        reads_copies=operator != FLASH_KERNEL,
    )
    for operator, supports, factors in ((FLASH_KERNEL, _forward, 3), (_BACKWARD, _backward, 4))
)
WITH_COPIES = narrow_copies.keeping(FLASH_KERNEL, {0: "query", 1: "key", 2: "value"}, _BACKWARD)
