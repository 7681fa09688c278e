"""Denormal results of torch's threads, which become 0 while optimizers step.

A moment whose gradients have become 0, as those of dead units and rare words do, decays until it is denormal: a mean
by 0.9 after 800 steps. It stays the smallest number then, since 0.9 of that is rounded up, and each later step takes
about ten times as long. What is smaller than 2^-126 changes no parameter: it is far below the eps of any divisor.
`torch.set_flush_denormal` is for the calling thread alone, and does not tell what was set before.
"""

from __future__ import annotations

import torch

from nano_loop.kernels.build import compiled, why_none
from nano_loop.kernels.compiler import OPENMP


def flush() -> int:
    """Let denormal results of torch's threads be 0, until `restore` is called with the number that this returns.

    Returns
    -------
    int
        How many threads they are: 0 where the functions in C run on others.
    """
    if why_none() is not None:
        return 0
    threads = torch.get_num_threads()
    compiled(OPENMP).flush_threads(threads)
    return threads


def restore(threads: int) -> None:
    """Let so many threads compute with denormal numbers as before."""
    if threads:
        compiled(OPENMP).restore_threads(threads)
