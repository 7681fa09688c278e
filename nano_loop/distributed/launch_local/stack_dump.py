"""Where a worker's threads are: it writes that to a file when a signal comes, whatever it is doing then."""

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
_STOPPED = ("T", "t")  # states of a process, as in /proc
_IS_STOPPED = "it is stopped, by SIGSTOP or a debugger; kill -CONT makes it go on"


def dump_on_signal(folder: str, rank: int) -> None:
    """Let this process write the stacks of its threads to a file in the run's folder whenever the signal comes."""
    try:
        file = _path(folder, rank).open("w")  # stays open as long as the process lives
    except OSError:  # the folder has no room, which what comes next says better
        signal.signal(_SIGNAL, signal.SIG_IGN)
    else:
        faulthandler.register(_SIGNAL, file, all_threads=True)


def request(process: int, folder: str, rank: int) -> None:
    """Send the signal; of a process that is stopped, write down that."""
    with contextlib.suppress(OSError):  # there is no /proc, or the process is gone
        os.kill(process, _SIGNAL)
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in _STOPPED:
            _path(folder, rank).write_text(_IS_STOPPED)


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
