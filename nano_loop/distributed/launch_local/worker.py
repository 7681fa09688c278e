"""What a worker process does: it reads its payload, does the task, and reports how that ended.

`nano_loop.distributed.launch_local.fork_server` calls `main`, in a new process that is bound to its CPUs.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from nano_loop.distributed.files.private_files import guard_files, redirect_files
from nano_loop.distributed.launch.assignment import PAYLOAD, WORKER_INIT, Assignment
from nano_loop.distributed.launch.failure import Failure, flush_output, pickled, raised
from nano_loop.distributed.launch.running import run_task
from nano_loop.distributed.launch_local.frames import framed
from nano_loop.distributed.launch_local.worker_warnings import sent
from nano_loop.distributed.payload.payload import load
from nano_loop.integrations.fabric.rank_zero import note_rank

_sending = threading.Lock()  # threads of the loop may warn


def main(folder: Path, rank: int, reports: int, verbose: bool) -> NoReturn:
    """Run one worker to its end.

    Parameters
    ----------
    folder : pathlib.Path
        The folder that the ranks of the run have in common, with the payload in it.
    rank : int
        Its rank.
    reports : int
        The file descriptor to which it reports.
    verbose : bool
        Whether all that it prints is shown.
    """
    note_rank(rank)
    if not verbose:
        sent(lambda warning: _send(reports, framed(warning)))
    where = ""
    try:
        keep_sockets_in(folder)
        redirect_files(folder, rank)
        if (folder / WORKER_INIT).exists():
            where = " in worker_init"
            load(folder / WORKER_INIT)()
            where = ""
        assignment: Assignment = load(folder / PAYLOAD)
        if not assignment.task.reads_more:
            guard_files()  # what is in the payload may be mapped from rank 0's descriptors, which it shuts off
        gc.freeze()  # what has been imported stays; the garbage collector need not go through it again and again
        gc.enable()
        _send(reports, framed({"kind": "ready"}))
        run_task(assignment, rank)
    except BaseException as error:
        # torch's handler raises where a loader's process has died, also in the midst of the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _report(reports, raised(rank, error, traceback.format_exc(), where), error)
    else:
        flush_output()
        _send(reports, framed({"kind": "finished"}))
    os._exit(0)  # threads of the user's may be running; there is nothing to clean up that rank 0 does not


def keep_sockets_in(folder: Path) -> None:
    """Let multiprocessing, which loaders use, have its temporary folder where rank 0 deletes it.

    And where paths are short: that of a socket has 107 characters at the most, and this process's temporary folder lies
    deep in the caller's.
    """
    place = folder / f"pymp-{os.getpid()}"
    place.mkdir(mode=0o700)
    # There is no public name for it; multiprocessing's own children inherit it in the same way.
    multiprocessing.current_process()._config["tempdir"] = str(place)  # type: ignore[attr-defined]


def _report(reports: int, failure: Failure, error: BaseException) -> None:
    """Report a failure: its words at once, for pickling an exception may fail or take long, and then the exception."""
    _send(reports, framed({"kind": "failed", "failure": failure.in_words()}))
    flush_output()
    _send(reports, framed({"kind": "exception"}, pickled(error)))


def _send(reports: int, message: bytes) -> None:
    with _sending, contextlib.suppress(OSError):  # rank 0 is gone, or the loop has closed what it did not open
        while message:
            message = message[os.write(reports, message) :]
