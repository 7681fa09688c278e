"""Calls MKL's vector functions once, before several threads call them concurrently.

MKL selects a function's code for this CPU at the function's first call. If two threads make that call concurrently, one
of them may silently run code of half the precision on its part of the tensor: tanh was off by 5e-5 in one process of
six (torch 2.13 with MKL 2024.2; https://github.com/pytorch/pytorch/issues/188792). The first training step would not be
reproducible.
"""

from __future__ import annotations

import functools

import torch

#: The functions that torch computes with MKL in fp32 and fp64.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt"),
    *("tan", "tanh", "trunc"),
)


@functools.cache
def resolve_mkl_functions(dtype: torch.dtype) -> None:
    """Call each of `FUNCTIONS` with one number in one thread, once per process: 0.8 ms and 2.5 MB of code."""
    if dtype not in (torch.float32, torch.float64) or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    one = torch.ones(1, dtype=dtype, device="cpu")
    for name in FUNCTIONS:
        getattr(torch, name)(one)
