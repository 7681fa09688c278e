"""Stack dumps of a worker's threads: it writes them to a file on a signal, whatever it is doing."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

#: A signal that loops do not handle. It is handled in C, so it works even if the GIL is held.
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 1
_LONGEST = 20_000  # characters
_IS_STOPPED = "it is stopped by SIGSTOP or a debugger; kill -CONT resumes it"


def dump_on_signal(folder: str, rank: int) -> None:
    """Make this process write the stacks of its threads to a file in the run's folder on the signal."""
    try:
        file = _path(folder, rank).open("w")  # stays open for the life of the process
    except OSError:  # the folder is full, for which a later error is clearer
        signal.signal(_SIGNAL, signal.SIG_IGN)
    else:
        faulthandler.register(_SIGNAL, file, all_threads=True)


def request(process: int, folder: str, rank: int) -> None:
    """Send the signal; if the process is stopped, write this to the file instead."""
    with contextlib.suppress(OSError, psutil.NoSuchProcess):  # the process has ended
        os.kill(process, _SIGNAL)
        if psutil.Process(process).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            _path(folder, rank).write_text(_IS_STOPPED)


def read(folder: str, rank: int, deadline: float) -> str:
    """Return the process's output once it is complete; empty if there is none."""
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
