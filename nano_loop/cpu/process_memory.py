"""The memory that this process has, has had, and may still get."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

from nano_loop.cpu.cgroup import read_memory_left
from nano_loop.cpu.tree import Tree

#: The limits of the shell's ``ulimit``, in kB of ``/proc/self/status``.
_ULIMITS = {"ulimit -v": (resource.RLIMIT_AS, "VmSize"), "ulimit -d": (resource.RLIMIT_DATA, "VmData")}


def peak_memory() -> int:
    """Return the most bytes of resident memory that this process has had at once."""
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if match:
        return int(match[1]) * 1024
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
    fields = dict(re.findall(r"^(\w+):\s+(\d{1,15}) kB$", tree.text("/proc/meminfo"), re.MULTILINE))
    left = {}
    if "MemAvailable" in fields:
        left["memory and swap"] = sum(int(fields.get(name, 0)) << 10 for name in ("MemAvailable", "SwapFree"))
    if (of_cgroup := read_memory_left(tree)) is not None:
        left["the cgroup"] = of_cgroup
    status = tree.text("/proc/self/status") if is_live else ""
    for name, (limit, used) in _ULIMITS.items():
        most = resource.getrlimit(limit)[0] if is_live else resource.RLIM_INFINITY
        has = re.search(rf"^{used}:\s*(\d+) kB$", status, re.MULTILINE)
        if most != resource.RLIM_INFINITY and has:
            left[name] = max(most - (int(has[1]) << 10), 0)
    return left
