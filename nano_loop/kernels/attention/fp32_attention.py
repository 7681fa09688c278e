"""Attention of fp32 tensors by a C function (``fp32_attention.c``), where that is faster than torch's flash kernel.

torch's kernel computes its products by MKL, which uses AVX-512 on CPUs of Intel alone.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.memory import BYTES, FP32, STRIDED, empty

_STRIDED = FP32._replace(layout=STRIDED)
KERNEL = CompiledKernel(
    "fp32_attention",
    {
        "fp32_attention_forward": (*(_STRIDED,) * 5, FP32, BYTES),
        "fp32_attention_backward": (*(_STRIDED,) * 8, BYTES),
    },
)
#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 20
_DIMENSIONS = 4  # batch, heads, rows, columns
_TENSORS = ("query", "key", "value", "out", "of_query", "of_key", "of_value", "of_out")
_INT = ctypes.c_int64


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = (
        *((name, _INT) for name in ("batch", "heads", "rows", "keys", "size", "is_causal")),
        *((name, _INT * 3) for name in _TENSORS),
        ("mask", _INT * 4),
        ("scale", ctypes.c_double),
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute softmax(query keyᵀ · scale + mask) value.

    Parameters
    ----------
    query, key, value : torch.Tensor
        float32, of shapes (B, H, L, E), (B, H, S, E) and (B, H, S, E), with the numbers of a row side by side.
    mask : torch.Tensor or None
        float32, and can be expanded to (B, H, L, S).
    is_causal : bool
        Whether a row sees no key behind its own place.
    scale : float
        The factor of the scores.

    Returns
    -------
    out : torch.Tensor
        Of shape (B, H, L, E). A row that sees no key is 0.
    log_sums : torch.Tensor
        The logarithm of the sum of each row's exponentials, of shape (B, H, L).
    """
    out = blocked_attention.laid_out_as(query)
    log_sums, mask = empty(*query.shape[:-1]), _expanded(mask, query, key)
    call = _call(is_causal, scale, mask, query=query, key=key, value=value, out=out)
    KERNEL("fp32_attention_forward", call, query, key, value, mask, out, log_sums, _memory(call, False))
    return out, log_sums


def backward(
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value from that of the output; see `forward`."""
    gradients = [blocked_attention.laid_out_as(tensor) for tensor in (query, key, value)]
    of_out, mask = blocked_attention.with_columns(of_out), _expanded(mask, query, key)
    laid_out = zip(_TENSORS, (query, key, value, of_out, *gradients, of_out), strict=True)
    call = _call(is_causal, scale, mask, **dict(laid_out))
    KERNEL("fp32_attention_backward", call, of_out, query, key, value, mask, *gradients, _memory(call, True))
    return tuple(gradients)


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the functions compute attention of these tensors, and may be faster than torch's kernel."""
    if query.dtype is not torch.float32:
        return False
    if any(tensor.dim() != _DIMENSIONS or tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    if key.shape != value.shape or (*query.shape[:2], query.size(3)) != (*key.shape[:2], key.size(3)):
        return False
    if query.numel() * key.size(2) < MIN_MULTIPLICATIONS or (mask is not None and mask.requires_grad):
        return False
    sizes = _call(False, 1.0, None, query=query, key=key)
    return KERNEL.unavailable is None and KERNEL.bytes_of(sizes, 1) * torch.get_num_threads() <= SCRATCH_BOUND


def _expanded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:-1], key.size(-2))


def _call(is_causal: bool, scale: float, mask: Tensor | None, **tensors: Tensor) -> _Call:
    query, key = tensors["query"], tensors["key"]
    call = _Call(*query.shape[:3], key.size(2), query.size(3), is_causal)
    call.scale = scale
    for name, tensor in tensors.items():
        setattr(call, name, (_INT * 3)(*tensor.stride()[:3]))
    if mask is not None:
        call.mask = (_INT * 4)(*mask.stride())
    return call


def _memory(call: _Call, is_backward: bool) -> Tensor:
    return scratch(KERNEL.bytes_of(call, int(is_backward)) * torch.get_num_threads())
