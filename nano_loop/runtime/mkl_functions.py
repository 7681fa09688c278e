"""Calls MKL's functions of vectors once, before several threads do it together.

MKL chooses a function's code for this CPU at the function's first call. When two threads make that call at once, one of
them may run code of half the precision, on its share of the tensor and without an error: tanh was off by 5e-5 in one
process of six (torch 2.13 with MKL 2024.2; https://github.com/pytorch/pytorch/issues/188792). So the first step of a
training would not be reproducible.
"""

from __future__ import annotations

import functools

import torch

#: What torch computes by MKL, in fp32 and fp64.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt"),
    *("tan", "tanh", "trunc"),
)


@functools.cache
def resolve_mkl_functions(dtype: torch.dtype) -> None:
    """Call each of `FUNCTIONS` with one number, in one thread: 0.8 ms and 2.5 MB of code, once in a process.

    Parameters
    ----------
    dtype : torch.dtype
        fp32 or fp64, for which MKL has separate functions. It has none for other dtypes.
    """
    if dtype not in (torch.float32, torch.float64) or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    one = torch.ones(1, dtype=dtype, device="cpu")
    for name in FUNCTIONS:
        getattr(torch, name)(one)
