"""The start time of a process, and its link to its parent, with which it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from functools import cache

import psutil  # type: ignore[import-untyped,unused-ignore]

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@cache
def process_start() -> float:
    """Return the start time of this process on the clock of `time.time`, to the second."""
    return float(psutil.Process().create_time()) - 1


def end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends. Only Linux supports this.

    Parameters
    ----------
    parent : int
        The process ID of the parent. If it has already ended, this process ends immediately.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
