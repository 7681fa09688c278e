"""The rates that this machine reaches: bytes per second of its memory, and FLOPs per second of products."""

from __future__ import annotations

import time

import torch

_COPIED = 256 << 20  # bytes by whose copy the rate of the machine's memory is measured
_SIDE = 2048  # of the square products by which the machine's rate is measured


def memory_rate() -> float:
    """Return the bytes per second that this machine reads and writes, by copies that no cache holds."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target, best = torch.ones_like(source), 0.0
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * _COPIED / (time.perf_counter() - began))
    return best


def product_rate(dtype: torch.dtype | None) -> float:
    """Return the FLOPs per second of large products, in the faster of fp32 and another dtype."""
    best = 0.0
    for candidate in (torch.float32, *([] if dtype is None else [dtype])):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            a = torch.ones(_SIDE, _SIDE, dtype=candidate)
            for _ in range(4):
                began = time.perf_counter()
                a @ a
                best = max(best, 2 * _SIDE**3 / (time.perf_counter() - began))
    return best
