"""Denormal results of torch's threads, which become 0 while optimizers step, and in oneDNN's backward of LSTMs.

A moment whose gradients have become 0, as those of dead units and rare words do, decays until it is denormal: a mean
by 0.9 after 800 steps. It stays the smallest number then, since 0.9 of that is rounded up, and each later step takes
about ten times as long. What is smaller than 2^-126 changes no parameter: it is far below the eps of any divisor.
`torch.set_flush_denormal` is for the calling thread alone, and does not tell what was set before.
"""

from __future__ import annotations

import torch

from nano_loop.kernels.build import compiled, why_none
from nano_loop.kernels.compiler import OPENMP


def count_of_threads() -> int:
    """Return how many threads `flush` and `restore` are to be told of: 0 where the functions in C run on others."""
    return torch.get_num_threads() if why_none() is None else 0


def flush(threads: int) -> None:
    """Let denormal results of so many threads be 0 until `restore`, in a ``try`` whose ``finally`` calls that."""
    if threads:
        compiled(OPENMP).flush_threads(threads)


def restore(threads: int) -> None:
    """Let so many threads compute with denormal numbers as before. Without a call of `flush` it changes nothing."""
    if threads:
        compiled(OPENMP).restore_threads(threads)
