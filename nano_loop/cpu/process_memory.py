"""The memory that this process has had."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """Return the most bytes of resident memory that this process has had at once."""
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if match:
        return int(match[1]) * 1024
    # On Linux, this begins at what the parent had when it started this process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
