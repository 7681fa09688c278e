"""Matrix products in fp32 by a C function (``fp32_product.c``), where it is faster than torch's kernel.

MKL uses AVX-512 on Intel CPUs only. On others, such as AMD's Zen 5, this function computes twice as many values at a
time. Elsewhere MKL is at least as fast, so torch's kernel is used until the function was measured to be faster.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.memory import FP32, STRIDED, empty

_STRIDED = FP32._replace(layout=STRIDED)
KERNEL = CompiledKernel("fp32_product", {"fp32_product": (_STRIDED, _STRIDED, FP32, FP32)})
#: Minimum number of multiplications. Below it, the Python overhead exceeds the gain.
MIN_MULTIPLICATIONS = 1 << 20


class _Shape(ctypes.Structure):
    """`Shape` of the C file."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "columns", "depth", "a_row", "a_step", "b_step", "b_column")
    )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a b, or a b + bias, of float32 tensors.

    `a` and `b` have shapes (M, K) and (K, N), with any strides. K is not 0. The bias has shape (N,). The result has
    shape (M, N). Sums do not depend on the number of threads.
    """
    call = _Shape(a.size(0), b.size(1), a.size(1), *a.stride(), *b.stride())
    out = empty(call.rows, call.columns)
    KERNEL("fp32_product", call, a, b, bias, out)
    return out
