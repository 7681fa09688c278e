"""Flushes denormal results of torch's threads to 0 during optimizer steps and in oneDNN's LSTM backward.

A moment whose gradients have become 0, as for dead units and rare words, decays until it is denormal: a mean with
factor 0.9 after 800 steps. It then remains the smallest denormal, since 0.9 times that is rounded up, and each later
step takes about ten times as long. A value below 2^-126 changes no parameter: it is far below the eps of any divisor.
`torch.set_flush_denormal` only affects the calling thread and does not report the previous setting.
"""

from __future__ import annotations

import torch

from nano_loop.kernels.build import compiled, why_none
from nano_loop.kernels.compiler import OPENMP


def count_of_threads() -> int:
    """Return the number of threads for `flush` and `restore`: 0 if C functions use other threads than torch."""
    return torch.get_num_threads() if why_none() is None else 0


def flush(threads: int) -> None:
    """Flush denormal results of this many threads to 0 until `restore`, which must be called in a ``finally``."""
    if threads:
        compiled(OPENMP).flush_threads(threads)


def restore(threads: int) -> None:
    """Restore denormal arithmetic in this many threads. Does nothing without a previous call of `flush`."""
    if threads:
        compiled(OPENMP).restore_threads(threads)
