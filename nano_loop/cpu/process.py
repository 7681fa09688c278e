"""The process: its start time, its link to its parent, its memory, and how long its threads have waited for CPUs."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from nano_loop.cpu.cgroup import read_memory_left
from nano_loop.cpu.tree import Tree

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@cache
def process_start() -> float:
    """Return the start time of this process on the clock of `time.time`, to the second."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # imported here, as `import nano_loop.cpu` is quick

    return float(psutil.Process().create_time()) - 1


def end_with(parent: int) -> None:
    """Let the system, if it is Linux, kill this process when its parent with this id ends, or end now if it has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


#: The limits of the shell's ``ulimit``, and their usage in ``/proc/self/status``.
_ULIMITS = {"ulimit -v": (resource.RLIMIT_AS, "VmSize"), "ulimit -d": (resource.RLIMIT_DATA, "VmData")}


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    if peak := Tree("/").sizes("/proc/self/status").get("VmHWM"):
        return peak
    # On Linux, this starts at the parent's memory when it started this process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory() -> int | None:
    """Return the current resident memory of this process in bytes; None if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def memory_left(tree: Tree, is_live: bool = True) -> dict[str, int]:
    """Return the bytes that this process, if the tree is live, may still allocate, by the kind of limit."""
    fields = tree.sizes("/proc/meminfo")
    left = {}
    if "MemAvailable" in fields:
        left["memory and swap"] = fields["MemAvailable"] + fields.get("SwapFree", 0)
    if (of_cgroup := read_memory_left(tree)) is not None:
        left["the cgroup"] = of_cgroup
    has = tree.sizes("/proc/self/status") if is_live else {}
    for name, (limit, used) in _ULIMITS.items():
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and used in has:
            left[name] = max(most - has[used], 0)
    return left


_TASKS = Path("/proc/self/task")
#: Times are unreliable from this fraction of waiting time on.
BUSY = 0.2


class Waits:
    """How long threads that could run have waited since then, as other programs or threads used the CPUs."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        self._before = _counted(tasks)

    def share(self) -> float | None:
        """Return the fraction of runnable time that threads waited for a CPU; None if the system does not count it."""
        running = waiting = 0
        for thread, now in _counted(self._tasks).items():
            before = self._before.get(thread, (0, 0))
            running += now[0] - before[0]
            waiting += now[1] - before[1]
        return waiting / (running + waiting) if running + waiting > 0 else None


def is_busy(share: float | None) -> bool:
    """Whether other programs used the CPUs so much that times are unreliable."""
    return share is not None and share >= BUSY


def unsure(share: float | None) -> str:
    """Return a remark about unreliable measurements, which are not saved, or an empty string."""
    return f"; unsure: threads waited {share:.0%} of that time for other programs" if is_busy(share) else ""


def _counted(tasks: Path) -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread has run, and has waited for a CPU."""
    counted = {}
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError, ValueError):  # the thread has ended, or a kernel writes something else
            running, waiting, _ = map(int, path.read_text().split())
            counted[path.parent.name] = running, waiting
    return counted
