"""The begin of a process, and its link to its parent, with which it ends."""

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
    """Return when this process began, as `time.time` counts, to the second."""
    return float(psutil.Process().create_time()) - 1


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
