"""The memory that this process has, has had, and may still get."""

from __future__ import annotations

import os
import resource
import sys

from nano_loop.cpu.cgroup import read_memory_left
from nano_loop.cpu.tree import Tree

#: The limits of the shell's ``ulimit``, in kB of ``/proc/self/status``.
_ULIMITS = {"ulimit -v": (resource.RLIMIT_AS, "VmSize"), "ulimit -d": (resource.RLIMIT_DATA, "VmData")}


def peak_memory() -> int:
    """Return the most bytes of resident memory that this process has had at once."""
    if peak := Tree("/").sizes("/proc/self/status").get("VmHWM"):
        return peak
    # On Linux, this begins at what the parent had when it started this process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory() -> int | None:
    """Return the bytes of resident memory that this process has now; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def memory_left(tree: Tree, is_live: bool = True) -> dict[str, int]:
    """Return the bytes that this process may still get, by what limits them.

    Parameters
    ----------
    tree : Tree
        Where ``/proc`` and ``/sys`` are.
    is_live : bool
        Whether they are this machine's, so that the limits of this process are known.
    """
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
