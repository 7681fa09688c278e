"""The stacks of a worker's threads: it writes them to a file when a signal comes, whatever it is doing then."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

#: Not one that a loop handles; handled in C, so also where Python's lock is held.
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 1
_LONGEST = 20_000  # characters
#: States of a process that is stopped, by SIGSTOP or a debugger, as in /proc.
STOPPED = ("T", "t")


def dump_on_signal(folder: str, rank: int) -> None:
    """Let this process write the stacks of its threads to a file in the run's folder whenever the signal comes."""
    try:
        file = _path(folder, rank).open("w")  # stays open as long as the process lives
    except OSError:  # the folder has no room, which what comes next says better
        signal.signal(_SIGNAL, signal.SIG_IGN)
    else:
        faulthandler.register(_SIGNAL, file, all_threads=True)


def request(process: int) -> str:
    """Send the signal, and return the process's state as /proc has it."""
    state = state_of(process)
    with contextlib.suppress(OSError):  # the process is gone
        os.kill(process, _SIGNAL)
    return state


def state_of(process: int) -> str:
    """Return a process's state as /proc has it; nothing where there is no /proc, or the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def read(folder: str, rank: int, deadline: float) -> str:
    """Return what the process has written, once that is complete; nothing where it writes nothing."""
    dump, path = "", _path(folder, rank)
    while time.monotonic() < deadline:
        written = path.read_text(errors="replace") if path.exists() else ""
        if written and written == dump:
            break
        dump = written
        time.sleep(0.02)
    return dump[:_LONGEST]


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"
