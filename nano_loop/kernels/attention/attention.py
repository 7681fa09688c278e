"""Attention in bf16 on the CPU by a different algorithm than torch's.

torch's CPU kernel ("flash") works in blocks, but its small bf16 products reach a fifth of the speed of oneDNN's large
ones, and it does not support dropout. The C function (`blocked_attention`) is faster on CPUs with the bf16 instructions
of AVX-512. Its error against fp64 is no larger than that of torch's kernel (see docs/measurements.md for errors and
times).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.kernels import override
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.memory import is_plain
from nano_loop.kernels.override import BF16, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.torch_private import in_functorch
from nano_loop.patching.torch_private_autograd import in_forward_mode

#: The name of the C algorithm.
BLOCKS = "blocks"
#: Minimum number of scores. Below it, the Python overhead exceeds the gain.
MIN_SCORES = 1 << 14
#: Minimum head size. Smaller heads gain nothing, and torch's kernel is more accurate for them.
_MIN_HEAD_SIZE = 16
_DTYPES = torch.float32, torch.float16, torch.bfloat16


def _supports(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call | None:
    """Return a call under bf16 autocast that is large enough and that another algorithm may compute."""
    if torch.compiler.is_compiling():  # reading sizes would add guards
        return None
    tensors, mask = (query, key, value), attn_mask
    if min(tensor.dim() for tensor in tensors) < 3 or math.prod(query.shape[:-1]) * key.size(-2) < MIN_SCORES:
        return None
    # A user who disables torch's flash kernel with `sdpa_kernel` may need the second derivative of the math kernel.
    if in_functorch() or in_forward_mode() or not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return None
    if torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return None
    if not all(is_plain(tensor, _DTYPES) for tensor in tensors):
        return None
    if mask is not None and (is_causal or mask.requires_grad or mask.dtype not in (torch.bool, *_DTYPES)):
        return None
    if mask is not None and mask.dim() < 2:  # torch raises
        return None
    heads = -3 if enable_gqa else -2
    if not query.shape[:heads] == key.shape[:heads] == value.shape[:heads] or key.shape[-3:-1] != value.shape[-3:-1]:
        return None
    if query.size(-1) != key.size(-1) or (enable_gqa and not blocked_attention.share_heads(query, key)):
        return None
    if min(query.size(-1), value.size(-1)) < _MIN_HEAD_SIZE:
        return None
    factors = (*(tensor.bfloat16() for tensor in tensors), None if mask is None else _cast(mask, torch.bfloat16))
    details = dropout_p, is_causal, blocked_attention.scale_of(query, scale)
    return Call("attention", factors, (is_causal, dropout_p > 0), kernel, details=details, leaves=3, timed=_timed)


def _timed(call: Call) -> Call | None:
    """Return a call without dropout, which would advance the generator."""
    scores = math.prod(call.tensors[0].shape[:-1]) * call.tensors[1].size(-2)
    measurable = call.is_measurable and scores <= override.MOST_ELEMENTS
    return call._replace(details=(0.0, *call.details[1:])) if measurable else None


def _in_blocks(call: Call) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return blocked_attention.blocked_attention(*call.tensors, *call.details)


def _by_torch(call: Call) -> Tensor:
    # Autocast would cast the products of fp32 scores to bf16.
    with torch.autocast("cpu", enabled=False):
        return blocked_attention.by_torch(*call.tensors, *call.details)


def _without_kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **how: Any
) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    query, key, value = (_cast(tensor, dtype) for tensor in (query, key, value))
    mask = None if attn_mask is None else _cast(attn_mask, dtype)
    with torch.autocast("cpu", enabled=False):
        return scaled_dot_product_attention(query, key, value, mask, *args, **how)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast like autocast, which leaves bool and float64 masks unchanged."""
    return tensor.to(dtype) if tensor.dtype in _DTYPES else tensor


_ALGORITHM = Algorithm(
    BLOCKS, _in_blocks, BF16, supports=lambda call: blocked_attention.supports(*call.tensors[:3]), has_reference=True
)
OVERRIDES = (
    Override(
        *("scaled_dot_product_attention", (_ALGORITHM,), _supports, lambda call: BLOCKS, _by_torch, "AutocastCPU"),
        otherwise=_without_kernel,
    ),
)
