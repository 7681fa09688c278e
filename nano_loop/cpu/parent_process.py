"""The begin of a process, and its link to its parent, with which it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_STARTTIME = 19  # in /proc/self/stat, behind the name


@cache
def process_start() -> float:
    """Return when this process began, as `time.time` counts, to the second; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
    return time.time() - age - 1


def end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, whatever it is doing then. Only Linux can.

    Parameters
    ----------
    parent : int
        The process ID of the parent. If it has ended already, this process ends at once.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
