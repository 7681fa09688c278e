"""Findings about memory: how much there is, its limit, and the file system for shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import SHARED_MEMORY, Inspected

_SMALL_SHARED = 1 << 30  # bytes. Docker's default is 64 MiB, which two workers of a loader of images can fill
_SHORT = 0.05  # the part of the memory that is still available


def in_words(count: int) -> str:
    """Return a number of bytes in a unit that people read."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def shared_memory_is_small(inspected: Inspected) -> Iterator[Finding]:
    """Find a container's default size."""
    size = inspected.memory.shared
    if size is not None and size < _SMALL_SHARED:
        yield Finding(
            "shared-memory",
            f"{SHARED_MEMORY} has {in_words(size)}",
            "workers of a DataLoader exchange data there, and end with a bus error when it is full",
            "Enlarge it (docker run --shm-size=8g, Kubernetes: an emptyDir with medium: Memory)",
        )


def memory_is_short(inspected: Inspected) -> Iterator[Finding]:
    """Find other programs that use nearly all of the memory."""
    total, available = inspected.memory.total, inspected.memory.available
    if total and available is not None and available < _SHORT * total:
        yield Finding(
            "memory-short",
            f"{in_words(available)} of {in_words(total)} memory are available",
            "a training that needs more is swapped out or killed",
            "End other programs, or use a smaller batch",
        )


def memory_is_limited(inspected: Inspected) -> Iterator[Finding]:
    """Find a limit of the cgroup."""
    limit, total = inspected.memory.limit, inspected.memory.total
    if limit is not None:
        of = f", and the machine has {in_words(total)}" if total is not None else ""
        yield Finding(
            "memory-limit",
            f"the cgroup's memory limit is {in_words(limit)}{of}",
            "the kernel kills a process that exceeds it, and files in shared memory count as well",
            "Raise it (docker run --memory=..., Kubernetes: resources.limits.memory) if training is killed",
            hurts=False,
        )


FINDINGS = (shared_memory_is_small, memory_is_short, memory_is_limited)
