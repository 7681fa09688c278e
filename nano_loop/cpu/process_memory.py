"""The memory that this process has had."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]


def peak_memory() -> int:
    """Return the most bytes of resident memory that this process has had at once."""
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(match[1]) * 1024 if match else _counted_by_the_system()


def _counted_by_the_system() -> int:
    # Not on Linux, where `ru_maxrss` begins at what the parent had when it started this process.
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
