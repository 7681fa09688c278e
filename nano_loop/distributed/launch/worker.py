"""The work of a worker process, from its payload to its last report."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.private_files import explaining, guard_files, redirect_files
from nano_loop.distributed.launch.active_runs import of_ranks, running, whole_process
from nano_loop.distributed.launch.assignment import PAYLOAD, WORKER_INIT, Assignment
from nano_loop.distributed.launch.failure import flush_output
from nano_loop.distributed.launch.stream import Reporter
from nano_loop.distributed.payload.payload import load
from nano_loop.integrations.fabric.rank_zero import note_rank
from nano_loop.storage.trusted_files import opened_folder, path_of

Join = Callable[[Assignment, int], AbstractContextManager[RankSlot]]


def work(reporter: Reporter, folder: Path, join: Join, *, payload: Path) -> None:
    """Do what a worker process is for: read its payload, do the task, and report how that has ended.

    What is changed in the process (torch's settings, its seeds, its files) is left changed: it ends with the run.

    Parameters
    ----------
    reporter : Reporter
        The connection to rank 0.
    folder : pathlib.Path
        The private folder for what this process writes (`nano_loop.distributed.files.folder`).
    join : callable
        Takes the assignment and this rank, and returns a context in which the ranks are connected.
    payload : pathlib.Path
        The folder with the payload.
    """
    note_rank(reporter.rank)
    where = ""
    try:
        with opened_folder(payload) as opened:
            _keep_sockets_in(folder)
            redirect_files(folder, reporter.rank)
            sent_by_rank_0 = path_of(opened, payload)
            if (sent_by_rank_0 / WORKER_INIT).exists():
                where = " in worker_init"
                load(sent_by_rank_0 / WORKER_INIT)()
                where = ""
            assignment: Assignment = load(sent_by_rank_0 / PAYLOAD)
        task = assignment.task
        guard_files()  # what is in the payload may be mapped from rank 0's descriptors, which it shuts off
        gc.freeze()  # what has been imported stays; the garbage collector need not go through it again and again
        gc.enable()
        reporter.report("ready")
        whole = whole_process("this worker process", of_ranks(assignment.size))
        with explaining(), whole, join(assignment, reporter.rank) as slot:
            assignment.state.take_over(slot.machine.num_threads)
            # An optimizer that was pickled has lost the mark of its scheduler, not the scheduler.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            with running(slot, task):
                task.run_in(slot)
    except BaseException as error:
        reporter.report_failure(error, where)
    else:
        flush_output()
        reporter.report("finished")


def _keep_sockets_in(folder: Path) -> None:
    """Let multiprocessing, which loaders use, have its temporary folder where rank 0 deletes it.

    And where paths are short: that of a socket has 107 characters at the most, and this process's temporary folder lies
    deep in the caller's.
    """
    place = folder / f"pymp-{os.getpid()}"
    place.mkdir(mode=0o700)
    # There is no public name for it; multiprocessing's own children inherit it in the same way.
    multiprocessing.current_process()._config["tempdir"] = str(place)  # type: ignore[attr-defined]
