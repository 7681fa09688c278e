"""Products of bf16 matrices by a C function (``product.c``): the linear layers of a model, and their gradients.

oneDNN copies matrices whose rows do not begin at a cache line, as those of a vocabulary of 50,257 words, and waits for
memory where this function fetches ahead. It needs a CPU with AVX-512's bf16 instructions.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nano_loop.kernels.build import SCRATCH_BOUND, CompiledKernel, scratch

KERNEL = CompiledKernel("product", needs_avx512_bf16=True)
#: Minimum of rows, columns and depth: with fewer, most of a tile is empty, or packing takes as long as the product.
_FEWEST = 32

_INT = ctypes.c_int64


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = (
        *((name, _INT) for name in ("rows", "columns", "depth")),
        *(("a", _INT * 2), ("b", _INT * 2), ("out_row", _INT), ("is_wide", _INT)),
    )


def fits(a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel supports these arguments of `product`."""
    if min(*a.shape, b.size(1)) < _FEWEST or 1 not in a.stride() or 1 not in b.stride():
        return False
    if min(a.stride()) < 1 or min(b.stride()) < 1 or (bias is not None and bias.stride() != (1,)):
        return False
    if not all(each.data_ptr() for each in (a, b, bias) if each is not None):  # the storage was released
        return False
    return KERNEL.unavailable is None and _bytes(_call(a, b)) <= SCRATCH_BOUND


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Compute a b, or a b + bias.

    Parameters
    ----------
    a, b : torch.Tensor
        bfloat16, of shapes (M, K) and (K, N), of which `fits` is True: one of the strides of each is 1.
    bias : torch.Tensor, optional
        bfloat16, of shape (N,).
    out : torch.Tensor, optional
        bfloat16 or float32, of shape (M, N), with the columns of a row side by side. Is overwritten.

    Returns
    -------
    torch.Tensor
        Of shape (M, N): `out` if it was given, else bfloat16. Sums are in fp32, and do not depend on the number of
        threads.
    """
    out = torch.empty(a.size(0), b.size(1), dtype=torch.bfloat16, device="cpu") if out is None else out
    call = _call(a, b)
    call.out_row, call.is_wide = out.stride(0), out.dtype is torch.float32
    KERNEL("product", call, a, b, bias, out, scratch(_bytes(call)))
    return out


def _call(a: Tensor, b: Tensor) -> _Call:
    (rows, depth), columns = a.shape, b.size(1)
    return _Call(rows, columns, depth, (_INT * 2)(*a.stride()), (_INT * 2)(*b.stride()), columns)


def _bytes(call: _Call) -> int:
    return KERNEL.bytes_of(call, torch.get_num_threads())
