"""The time that threads of this process have waited for CPUs, as counted by Linux's scheduler."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
#: Times are unreliable from this fraction of waiting time on.
BUSY = 0.2


class Waits:
    """The waits since the creation of this object.

    A thread waits if it could run but other programs or threads use the CPUs. Threads that sleep or wait for a file do
    not count.

    Parameters
    ----------
    tasks : pathlib.Path
        The folder with the threads of this process.
    """

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
