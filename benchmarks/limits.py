"""What a workload's matrix products need, and how many of them this machine does in a second."""

from __future__ import annotations

import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads import Workload

SIZES = (1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16)
REPEATS, ENOUGH_SECONDS = 5, 1.0


def step_flops(work: Workload) -> float:
    """Return the matrix FLOPs of one training step, forward and backward, in plain fp32.

    Attention is counted as plain products: torch's counter knows them, but not the CPU's flash kernel.
    """
    batch = next(iter(work.batches))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work.loss(work.model, batch).backward()
    return counter.get_total_flops() + work.uncounted_flops


def matmul_gflops(small: bool) -> dict[str, float]:
    """Return by dtype the best GFLOP/s of large square products."""
    sizes = SIZES[:2] if small else SIZES
    return {str(dtype).removeprefix("torch."): max(_gflops(size, dtype) for size in sizes) for dtype in DTYPES}


def _gflops(size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out = torch.empty_like(a)  # so that no page is faulted in meanwhile
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(_seconds(a, b, out))
    return 2 * size**3 / 1e9 / min(seconds)


def _seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    return time.perf_counter() - start
