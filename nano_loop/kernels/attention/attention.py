"""Attention for bf16 on the CPU, by another algorithm than torch's.

torch's CPU kernel ("flash") works in blocks, but its small bf16 products run at a fifth of the speed of oneDNN's large
ones, and with a dropout it is not used. Blocks in C are faster (`blocked_attention`), on CPUs with the bf16
instructions of AVX-512. The error against fp64 is not larger than that of torch's kernel (docs/measurements.md has
errors and times).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.kernels.attention import blocked_attention, torch_attention
from nano_loop.kernels.memory import attempt, is_plain
from nano_loop.kernels.replacement import Choose, Replacement
from nano_loop.patching.ownership import belongs_to_set_up_model, rule_for
from nano_loop.patching.torch_private import in_functorch

#: Under this name, a call into a set-up model may have a rule that chooses the algorithm (see `Choose`).
ALGORITHM = "algorithm of attention"
#: The algorithms: blocks in C, and torch's kernel.
BLOCKS, TORCH = "blocks", "torch"
#: Minimum number of scores. Below it, the Python overhead exceeds the gain.
MIN_SCORES = 1 << 14
#: Minimum head size. With smaller heads there is no gain, and torch's kernel is more accurate.
_MIN_HEAD_SIZE = 16


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
            return attention(*args, **kwargs, ours=ours)
        return original(keys, *args, **kwargs)

    return dispatched


REPLACEMENTS = (Replacement("scaled_dot_product_attention", for_set_up_models, "AutocastCPU"),)


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
    ours: bool = True,
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
    ours : bool
        If False, torch's kernel computes the result.

    Returns
    -------
    torch.Tensor
        Of shape (..., heads, L, Ev), in autocast's dtype. It can be differentiated twice where torch's can.
    """
    dtype = torch.get_autocast_dtype("cpu")
    query, key, value = (_cast(tensor, dtype) for tensor in (query, key, value))
    mask = None if attn_mask is None else _cast(attn_mask, dtype)
    call = Arguments(query, key, value, mask, dropout_p, is_causal, blocked_attention.scale_of(query, scale))
    # Autocast is disabled, since it would cast the products of fp32 scores to bf16.
    with torch.autocast("cpu", enabled=False):
        supported = ours and not torch.compiler.is_compiling()
        if supported and _supports(query, key, value, mask, is_causal, enable_gqa):
            computed = attempt(ALGORITHMS[_algorithm(call)], *call)
            if computed is not None:
                return computed
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


class Arguments(NamedTuple):
    """The arguments of an algorithm; see `nano_loop.kernels.attention.blocked_attention.blocked_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float


#: The functions of the algorithms.
ALGORITHMS: dict[str, Callable[..., Tensor]] = {
    BLOCKS: blocked_attention.blocked_attention,
    TORCH: torch_attention.by_torch,
}


def _algorithm(call: Arguments) -> str:
    if not blocked_attention.supports(call.query, call.key, call.value):
        return TORCH
    rule: Choose | None = rule_for(ALGORITHM)
    return BLOCKS if rule is None else rule(call, lambda: ALGORITHMS, BLOCKS)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast like autocast, which does not change bool and float64 masks."""
    return tensor.to(dtype) if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else tensor


def _supports(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether another algorithm may compute a call, which is large enough. torch computes others, and raises errors."""
    tensors = (query, key, value)
    # A user who disables torch's flash kernel with `sdpa_kernel` may need a second derivative, as its math kernel has.
    if in_functorch() or not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if not all(tensor.dim() >= 3 and is_plain(tensor, (torch.bfloat16,)) for tensor in tensors):
        return False
    if mask is not None and (is_causal or mask.requires_grad or mask.dtype not in (torch.bool, torch.bfloat16)):
        return False
    heads = -3 if enable_gqa else -2
    if not query.shape[:heads] == key.shape[:heads] == value.shape[:heads] or key.shape[-3:-1] != value.shape[-3:-1]:
        return False
    if query.size(-1) != key.size(-1) or (enable_gqa and not blocked_attention.share_heads(query, key)):
        return False
    wide = min(query.size(-1), value.size(-1)) >= _MIN_HEAD_SIZE
    return wide and math.prod(query.shape[:-1]) * key.size(-2) >= MIN_SCORES
