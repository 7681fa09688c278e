"""Attention in blocks of rows by a C function (``attention.c``) that never stores a matrix of scores.

It reads heads in place, including views of one projection, and writes output and gradients in the same order. For the
backward it saves query, key and value, one number per row, and one byte per score if there is dropout. It requires the
bf16 instructions of AVX-512.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.double_backward import gradients_of
from nano_loop.kernels.memory import BF16, BYTES, FLOATS, FP32, STRIDED, Pointer, empty
from nano_loop.patching.torch_private import safe_softmax


def kernel_of(name: str, factor: Pointer, outs: Pointer, *masks: torch.dtype, is_bf16: bool) -> CompiledKernel:
    """Return the kernel of a C file for these dtypes of factors, results and masks."""
    factor, outs = factor._replace(layout=STRIDED), outs._replace(layout=STRIDED)
    inputs = (*[factor] * 3, Pointer(masks, STRIDED), BYTES)
    functions = {
        f"{name}_forward": (*inputs, outs, FP32, BYTES),
        f"{name}_backward": (*inputs, factor, FP32, *[outs] * 3, BYTES),
    }
    return CompiledKernel(name, functions, needs_avx512_bf16=is_bf16)


#: `mask_kind` of ``attention_call.h``.
_MASK_KINDS = {torch.bool: 1, torch.bfloat16: 2, torch.float32: 3}
KERNEL = kernel_of("attention", BF16, FLOATS, *_MASK_KINDS, is_bf16=True)
#: Head sizes are processed in pairs of columns.
_PAIR = 2
_DIMENSIONS = 4  # batch, heads, rows, columns

_INT = ctypes.c_int64
_NAMES = ("query", "key", "value", "out", "of_query", "of_key", "of_value", "of_out")


class _Call(ctypes.Structure):
    """`Call` of ``attention_call.h``."""

    _fields_ = (
        *((name, _INT) for name in ("batch", "heads", "group", "length", "keys", "width", "value_width")),
        *((name, _INT * 3) for name in _NAMES),
        *(("mask", _INT * 4), ("mask_kind", _INT), ("causal", _INT), ("is_wide", _INT), ("by_tiles", _INT)),
        *(("scale", ctypes.c_double), ("kept", ctypes.c_double)),
    )


class Inputs(NamedTuple):
    """The inputs of attention."""

    #: Query, key and value: bfloat16, or float32 for the fp32 kernel, of shape (batch, heads, rows, columns) with
    #: contiguous columns. The fp32 kernel requires that the three have equal sizes.
    query: Tensor
    key: Tensor
    value: Tensor
    #: The dtype is bool, bfloat16 or float32, of shape (batch, heads, L, S); only float32 for the fp32 kernel.
    mask: Tensor | None = None
    kept: Tensor | None = None  # uint8, of the same shape: 0 where dropout has zeroed a probability
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float = 1.0


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel supports these tensors, which `nano_loop.kernels.attention.attention` accepts."""
    if query.size(-1) % _PAIR or value.size(-1) % _PAIR or KERNEL.unavailable:
        return False
    return fits(KERNEL, *map(_as_heads, (query, key, value)))


def fits(kernel: CompiledKernel, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the memory of a backward, which grows with the number of keys, is within the bound."""
    return _bytes(kernel, _call(kernel, Inputs(query, key, value)), "backward") <= SCRATCH_BOUND


def share_heads(query: Tensor, key: Tensor) -> bool:
    """Whether there are key heads, each shared by the same number of query heads."""
    return key.size(-3) > 0 and query.size(-3) % key.size(-3) == 0


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the scale of the scores, or its default if it is None."""
    return 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """Compute softmax(query keyᵀ · scale + mask) value, with dropout on the softmax, of bf16 that `supports` accepts.

    Shapes are (..., heads, L, E), (..., key heads, S, E) and (..., key heads, S, Ev); the mask, bool or bf16, is
    broadcastable to (..., heads, L, S). With four dimensions, the result is a view of (batch, L, heads, Ev), like
    torch's. It is twice differentiable if torch's is.
    """
    kept = drawn(query, key, dropout_p)
    mask = None if mask is None else as_mask(mask, query, key)
    heads, are_four = [_as_heads(tensor) for tensor in (query, key, value)], query.dim() == _DIMENSIONS
    out: Tensor = _Attention.apply(*heads, mask, kept, dropout_p, is_causal, scale, are_four)  # type: ignore[no-untyped-call]
    return out if are_four else out.reshape(*query.shape[:-1], value.size(-1))


class _Attention(torch.autograd.Function):
    """`blocked_attention` for four dimensions; `are_four` tells whether the call had four."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, log_sums = forward(KERNEL, Inputs(*args[:-1]))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:5], log_sums)
        ctx.numbers, ctx.are_four = args[5:-1], args[-1]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        *tensors, log_sums = ctx.saved_tensors
        inputs = Inputs(*tensors, *ctx.numbers)
        others = inputs.mask, *ctx.numbers, inputs.kept

        def compute() -> list[Tensor]:
            gradients = [laid_out_as(tensor) for tensor in inputs[:3]]
            backward(KERNEL, inputs, with_columns(gradient), log_sums, gradients)
            return gradients

        def differentiable(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if ctx.are_four:
                return by_torch(query, key, value, *others)
            # For other numbers of dimensions, torch uses individual operators, which have more derivatives.
            return by_torch(query[None], key[None], value[None], *others)[0]

        return gradients_of(ctx, inputs[:3], (gradient,), compute, differentiable)


def forward(kernel: CompiledKernel, inputs: Inputs, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output of attention, in `out` if it is passed, and the log-sum-exp of each row."""
    batch, heads, rows, _ = inputs.query.shape
    if out is None:
        out = by_rows(batch, heads, rows, inputs.value.size(3))
    log_sums, call = empty(batch, heads, rows), _call(kernel, inputs)
    call.is_wide = out.dtype is torch.float32
    _note(call, "out", out)
    _run(kernel, "forward", call, *inputs[:5], out, log_sums)
    return out, log_sums


def backward(
    kernel: CompiledKernel, inputs: Inputs, gradient: Tensor, log_sums: Tensor, gradients: Sequence[Tensor]
) -> None:
    """Write the gradients of query, key and value, given that of the output, into the tensors in `gradients`."""
    call = _call(kernel, inputs)
    call.is_wide = gradients[0].dtype is torch.float32
    for name, tensor in zip(("of_query", "of_key", "of_value", "of_out"), (*gradients, gradient), strict=True):
        _note(call, name, tensor)
    _run(kernel, "backward", call, *inputs[:5], gradient, log_sums, *gradients)


def drawn(query: Tensor, key: Tensor, dropout_p: float) -> Tensor | None:
    """Draw the `kept` of `forward` for dropout, or return None without dropout."""
    shape = *query.shape[:-1], key.size(-2)
    return query.new_empty(shape, dtype=torch.uint8).bernoulli_(1 - dropout_p) if dropout_p else None


def as_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask in the format that `forward` accepts."""
    mask = mask if mask.stride(-1) in (0, 1) else mask.contiguous()
    return _as_four_dimensions(mask.expand(*query.shape[:-1], key.size(-2)))


def _as_heads(tensor: Tensor) -> Tensor:
    """Return a tensor as (batch, heads, rows, columns) with contiguous columns."""
    return with_columns(_as_four_dimensions(tensor))


def _as_four_dimensions(tensor: Tensor) -> Tensor:
    if tensor.dim() < _DIMENSIONS:
        return tensor.unsqueeze(0)
    return tensor if tensor.dim() == _DIMENSIONS else tensor.flatten(0, -_DIMENSIONS)


def with_columns(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def by_rows(batch: int, heads: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an empty tensor in which the heads of a row are adjacent, as the following projection reads them."""
    return empty(batch, rows, heads, columns, dtype=dtype).transpose(1, 2)


def laid_out_as(tensor: Tensor, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor with the same order of heads and rows as another one, by default in its dtype."""
    batch, heads, rows, own_columns = tensor.shape
    columns, dtype = own_columns if columns is None else columns, dtype or tensor.dtype
    if tensor.stride(1) < tensor.stride(2):
        return by_rows(batch, heads, rows, columns, dtype)
    return tensor.new_empty(batch, heads, rows, columns, dtype=dtype)


def _call(kernel: CompiledKernel, inputs: Inputs) -> _Call:
    query, key, value, mask, _, dropout_p, is_causal, scale = inputs
    batch, heads, length, width = query.shape
    call = _Call(batch, key.size(1), heads // max(key.size(1), 1), length, key.size(2), width, value.size(3))
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _note(call, name, tensor)
    call.causal, call.scale, call.kept = is_causal, scale, 1 - dropout_p
    call.by_tiles = kernel.uses_amx
    if mask is not None:
        call.mask, call.mask_kind = mask.stride(), _MASK_KINDS[mask.dtype]
    return call


def _note(call: _Call, name: str, tensor: Tensor) -> None:
    setattr(call, name, tensor.stride()[:3])


def _run(kernel: CompiledKernel, direction: str, call: _Call, *tensors: Tensor | None) -> None:
    kernel(f"{kernel.name}_{direction}", call, *tensors, scratch(_bytes(kernel, call, direction)))


def _bytes(kernel: CompiledKernel, call: _Call, direction: str) -> int:
    """Return the memory that all threads need."""
    return torch.get_num_threads() * kernel.bytes_of(call, int(direction == "backward"))


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
    """Compute attention by torch's operators, individual ones for a mask; not all kernels have second derivatives."""
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
