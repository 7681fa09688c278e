"""Systems tuned with a tuning guide: `by_hand`, and an allocator that keeps freed memory.

They do not use nano_loop. glibc's settings are those of mallopt(3); jemalloc's are those of torch's performance
tuning guide, and it must be loaded when the process starts.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.loop import Loss, steps, timed
from benchmarks.workloads import Workload

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_MOST = 1 << 30  # bytes: the largest threshold of mallopt
_MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)


def by_hand(work: Workload, count: int) -> list[float]:
    """A tuned loop: channels_last for images, a fused optimizer, bf16 autocast.

    It uses fp32 on a CPU without bf16 instructions, on which bf16 would take up to four hundred times as long.
    """
    return _by_hand(work, count, work.model)


def expert(work: Workload, count: int) -> list[float]:
    """`by_hand`, with glibc set to keep freed memory."""
    keep_memory()
    return by_hand(work, count)


def expert_compile(work: Workload, count: int) -> list[float]:
    """`expert`, and `torch.compile`.

    Raises
    ------
    RuntimeError
        It compiled nothing.
    """
    keep_memory()
    return compiled(lambda model: _by_hand(work, count, model), work.model)


def expert_fp32(work: Workload, count: int) -> list[float]:
    """fp32 with a fused optimizer, and glibc keeps freed memory: for models too small to gain from bf16."""
    return _in_fp32(work, count, work.model)


def expert_fp32_1_thread(work: Workload, count: int) -> list[float]:
    """`expert_fp32` with one thread."""
    torch.set_num_threads(1)
    return expert_fp32(work, count)


def expert_fp32_compile(work: Workload, count: int) -> list[float]:
    """`expert_fp32`, and `torch.compile` of the model.

    Raises
    ------
    RuntimeError
        It compiled nothing.
    """
    return compiled(lambda model: _in_fp32(work, count, model), work.model)


def compiled_step(work: Workload, count: int) -> list[float]:
    """`torch.compile` of a function of the whole step, in fp32, and glibc keeps freed memory.

    Raises
    ------
    RuntimeError
        It compiled nothing.
    """
    keep_memory()

    def step(batch: Any) -> None:
        work.optimizer.zero_grad()
        work.loss(work.model, batch).backward()
        work.optimizer.step()

    return compiled(lambda step: timed(step, work.batches, count), step)


def _in_fp32(work: Workload, count: int, model: Any) -> list[float]:
    keep_memory()
    for group in work.optimizer.param_groups:
        group["fused"] = True
    return steps(model, work.optimizer, work.batches, work.loss, count)


def expert_jemalloc(work: Workload, count: int) -> list[float]:
    """`by_hand`, with jemalloc instead of glibc's allocator.

    Raises
    ------
    RuntimeError
        jemalloc is not loaded: the process was not started with `jemalloc_settings`.
    """
    if "jemalloc" not in Path("/proc/self/maps").read_text():
        raise RuntimeError("jemalloc is not loaded")
    return by_hand(work, count)


def compiled(train: Callable[[Any], list[float]], function: Any) -> list[float]:
    """Train with a compiled model or function, and raise a RuntimeError if nothing was compiled."""
    from torch._dynamo.utils import counters  # there is no public function for this

    seconds = train(torch.compile(function))
    if not counters["stats"]["unique_graphs"]:
        raise RuntimeError("it compiled no part of the model, which ran without")
    return seconds


def has_fast_bf16() -> bool:
    """Whether Linux reports bf16 instructions of the CPU: nano_loop's check, without importing it."""
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().split()) if path.exists() else set()
    return bool(flags & {"avx512_bf16", "bf16"}) or {"amx_bf16", "amx_tile"} <= flags


def under_autocast(loss: Loss) -> Loss:
    """Autocast around the forward and the loss, as in torch's recipe."""

    def autocast_loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return autocast_loss


def _by_hand(work: Workload, count: int, model: Any) -> list[float]:
    for group in work.optimizer.param_groups:
        group["fused"] = True
    loss = under_autocast(work.loss) if has_fast_bf16() else work.loss
    if work.images:
        work.model.to(memory_format=torch.channels_last)
        loss = _with_channels_last(loss)
    return steps(model, work.optimizer, work.batches, loss, count)


def _with_channels_last(loss: Loss) -> Loss:
    """Convert the images, which are the first element of a batch, to channels_last."""

    def channels_last_loss(model: Any, batch: Any) -> torch.Tensor:
        images, *others = batch
        return loss(model, [images.to(memory_format=torch.channels_last), *others])

    return channels_last_loss


def keep_memory() -> None:
    """Set glibc to keep freed memory."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, _MOST)
    mallopt(_TRIM_THRESHOLD, _MOST)


def why_not_jemalloc() -> str | None:
    """Return why jemalloc cannot be measured here, or None."""
    return None if ctypes.util.find_library("jemalloc") else "jemalloc was not found (on Debian: libjemalloc2)"


def jemalloc_settings() -> Mapping[str, str]:
    """Return the environment variables of a process in which jemalloc is loaded."""
    library = ctypes.util.find_library("jemalloc")
    return {"LD_PRELOAD": library, "MALLOC_CONF": _MALLOC_CONF} if library else {}
