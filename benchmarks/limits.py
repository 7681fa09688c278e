"""Count the FLOPs of a workload's matrix products, and measure the rates of this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads import Workload

SIZES = (256, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16)
REPEATS, ENOUGH_SECONDS = 5, 1.0
COPIED = 512 << 20  # bytes
TOO_MANY_SECONDS = 5.0  # for one product: without bf16 instructions, size 4096 takes a quarter of an hour


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
    sizes = SIZES[:3] if small else SIZES
    return {str(dtype).removeprefix("torch."): _best_gflops(sizes, dtype) for dtype in DTYPES}


def _best_gflops(sizes: Sequence[int], dtype: torch.dtype) -> float:
    best = 0.0
    for size in sizes:
        if best and _flops(size) / 1e9 / best > TOO_MANY_SECONDS:
            break
        best = max(best, _gflops(size, dtype))
    return best


def _flops(size: int) -> float:
    return 2.0 * size**3


def _gflops(size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out = torch.empty_like(a)  # so that no page is faulted in meanwhile
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(_seconds(a, b, out))
    return _flops(size) / 1e9 / min(seconds)


def _seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    return time.perf_counter() - start


def copied_in_a_second() -> float:
    """Return the bytes that one thread reads and writes per second of CPU time, for data larger than the cache."""
    source, target = (torch.ones(COPIED, dtype=torch.uint8) for _ in range(2))
    torch.set_num_threads(1)
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        target.copy_(source)
        seconds.append(time.process_time() - began)
    return 2 * COPIED / min(seconds)
