"""What a worker process does: it reads its payload, does the task, and reports how that ended.

`nano_loop.distributed.launch.local.start.BOOTSTRAP` calls `main`, with the CPUs bound before torch is imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from nano_loop.distributed.launch.assignment import Assignment
from nano_loop.distributed.launch.checkpoints import save_memory_alone
from nano_loop.distributed.launch.failure import Failure, raised
from nano_loop.distributed.launch.joining import run_task
from nano_loop.distributed.launch.local.launcher import PAYLOAD
from nano_loop.distributed.payload.payload import load
from nano_loop.fabric import note_rank

_INTERVAL = 1.0  # seconds between two looks at the parent


def main(folder: Path, rank: int, report: int) -> NoReturn:
    """Run one worker to its end.

    Parameters
    ----------
    folder : pathlib.Path
        The folder that the ranks of the run have in common.
    rank : int
        Its rank.
    report : int
        The file descriptor to which it reports.
    """
    reports: Connection[Any, Any] = Connection(report, readable=False)
    os.set_inheritable(report, False)
    if not sys.stdin.buffer.readline():  # nothing comes where the caller is gone, or could not write the payload
        os._exit(1)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (for as long as the process lives: a worker is asked nothing)
    threading.Thread(target=_end_with_parent, args=(os.getppid(), folder), daemon=True).start()
    save_memory_alone()
    note_rank(rank)
    try:
        assignment: Assignment = load(folder / PAYLOAD)
        gc.freeze()  # what has been imported stays; the garbage collector need not go through it again and again
        gc.enable()
        reports.send_bytes(pickle.dumps(("ready", None)))
        run_task(assignment, rank)
    except BaseException as error:
        _report(reports, raised(rank, error, traceback.format_exc()))
    else:
        _flush()
        reports.send_bytes(pickle.dumps(("finished", None)))
    os._exit(0)  # threads of the user's may be running; there is nothing to clean up that rank 0 does not


def _report(reports: Connection[Any, Any], failure: Failure) -> None:
    _flush()
    for sent in (failure, replace(failure, error=None)):
        try:
            content = cloudpickle.dumps(("failed", sent))
            pickle.loads(content)  # exceptions of the user's may pickle and not come back
        except Exception:  # nothing is known of what a user's exception does when it is pickled
            continue
        with contextlib.suppress(OSError):  # rank 0 is gone
            reports.send_bytes(content)
        return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _end_with_parent(parent: int, folder: Path) -> None:
    """End this process and all that it has started when the caller's process is gone, which nothing else would."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _INTERVAL)
        if readable and not os.read(0, 1):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
