"""The load of the machine by other programs, which makes the times of a search unsure."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import psutil

#: The part of the time in which other programs keep the CPUs busy, from which on a result is not kept.
BUSY = 0.15
_SECONDS = 0.1
_IDLE = ("idle", "iowait")


def load_of(cpus: Collection[int]) -> float:
    """Return the fraction of a tenth of a second that CPUs are busy while this process sleeps; 0 if unknown.

    Parameters
    ----------
    cpus : collection of int
        The ids of the CPUs that this process may use.
    """
    try:
        before = psutil.cpu_times(percpu=True)
        time.sleep(_SECONDS)
        readings = enumerate(zip(before, psutil.cpu_times(percpu=True), strict=False))
    except OSError:  # without /proc
        return 0.0
    shares = [_busy(first, second) for cpu, (first, second) in readings if cpu in cpus]
    return sum(shares) / len(shares) if shares else 0.0


def _busy(before: Any, after: Any) -> float:
    """Return the fraction of the time between two readings that a CPU was busy."""
    passed, idle = (
        sum(getattr(after, name, 0.0) - getattr(before, name, 0.0) for name in names)
        for names in (after._fields, _IDLE)
    )
    return 1 - idle / passed if passed > 0 else 0.0
