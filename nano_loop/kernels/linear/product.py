"""Matrix products in bf16 by a C function (``product.c``): the linear layers of a model, and their gradients.

Matrices are in bf16 or fp32. The function rounds fp32 values while packing, which reads them anyway.

oneDNN copies matrices whose rows are not aligned to cache lines, such as those of a vocabulary of 50,257 words, and
stalls on memory that this function prefetches. It requires the bf16 instructions of AVX-512, and uses AMX if available.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch
from nano_loop.kernels.memory import BYTES, FLOATS, STRIDED, empty

_STRIDED = FLOATS._replace(layout=STRIDED)
KERNEL = CompiledKernel("product", {"product": (_STRIDED, _STRIDED, FLOATS, _STRIDED, BYTES)}, needs_avx512_bf16=True)
#: Minimum number of rows, columns and depth: with fewer, most of a tile is empty, or packing dominates.
FEWEST = 32
_DIMENSIONS = 2

_INT = ctypes.c_int64


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = (
        *((name, _INT) for name in ("rows", "columns", "depth")),
        *(("a", _INT * 2), ("b", _INT * 2), ("out_row", _INT), ("batch", _INT), ("of_batch", _INT * 3)),
        *((name, _INT) for name in ("a_is_wide", "b_is_wide", "bias_is_wide", "is_wide", "by_tiles")),
    )


def supports(a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel supports these arguments of `product`."""
    if min(*a.shape[-2:], b.size(-1)) < FEWEST or not (_is_matrix(a) and _is_matrix(b)):
        return False
    if bias is not None and bias.stride() != (1,):
        return False
    return KERNEL.unavailable is None and _bytes(_call(a, b)) <= SCRATCH_BOUND


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute a b, or a b + bias, with a and b rounded to bf16.

    Parameters
    ----------
    a, b : torch.Tensor
        bfloat16, or float32, which is rounded to bfloat16, of shapes (M, K) and (K, N), or (B, M, K) and (B, K, N).
        `supports` must be True for them: one of the strides of each matrix is 1.
    bias : torch.Tensor, optional
        bfloat16 or float32, of shape (N,).
    out : torch.Tensor, optional
        bfloat16 or float32, of shape (M, N) or (B, M, N), with contiguous rows. It is overwritten.
    dtype : torch.dtype
        The dtype of the result if `out` is None: bfloat16 or float32.

    Returns
    -------
    torch.Tensor
        Of shape (M, N) or (B, M, N): `out` if it was passed. Sums are accumulated in fp32 and do not depend on the
        number of threads.
    """
    out = empty(*a.shape[:-1], b.size(-1), dtype=dtype) if out is None else out
    call = _call(a, b)
    call.out_row, call.is_wide = out.stride(-2), out.dtype is torch.float32
    call.bias_is_wide = bias is not None and bias.dtype is torch.float32
    if out.dim() > _DIMENSIONS:
        call.of_batch[2] = out.stride(0)
    KERNEL("product", call, a, b, bias, out, scratch(_bytes(call)))
    return out


def can_be_filled(out: Tensor, shape: torch.Size, dtype: torch.dtype, inputs: Iterable[Tensor | None]) -> bool:
    """Whether the result can overwrite `out`. Otherwise, torch resizes it, copies overlapping memory, or raises."""
    if type(out) is not Tensor or out.dtype is not dtype or out.shape != shape or out.stride(-1) != 1:
        return False
    if out.stride(-2) < shape[-1] or (len(shape) > _DIMENSIONS and out.stride(0) < out.stride(1) * shape[1]):
        return False
    storage = out.untyped_storage().data_ptr()
    return storage != 0 and all(tensor is None or tensor.untyped_storage().data_ptr() != storage for tensor in inputs)


def _is_matrix(tensor: Tensor) -> bool:
    strides = tensor.stride()[-_DIMENSIONS:]
    return min(strides) == 1


def _call(a: Tensor, b: Tensor) -> _Call:
    (rows, depth), columns = a.shape[-_DIMENSIONS:], b.size(-1)
    strides = [tensor.stride()[-_DIMENSIONS:] for tensor in (a, b)]
    call = _Call(rows, columns, depth, *strides, columns, 1)
    call.a_is_wide, call.b_is_wide = a.dtype is torch.float32, b.dtype is torch.float32
    call.by_tiles = KERNEL.uses_amx
    if a.dim() > _DIMENSIONS:
        call.batch, call.of_batch = a.size(0), (a.stride(0), b.stride(0), 0)
    return call


def _bytes(call: _Call) -> int:
    return KERNEL.bytes_of(call, torch.get_num_threads())
