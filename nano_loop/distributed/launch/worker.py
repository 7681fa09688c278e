"""What a worker process is sent (its task, the slots of the ranks, the state of the caller's process), and its work."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nano_loop.config.options import Options
from nano_loop.data.random_states import process_states, set_process_states
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.private_files import explaining, guard_files, redirect_files
from nano_loop.distributed.launch.active_runs import of_ranks, running, whole_process
from nano_loop.distributed.launch.failure import flush_output
from nano_loop.distributed.launch.launcher import Task
from nano_loop.distributed.launch.stream import Reporter
from nano_loop.distributed.payload.payload import dump, load
from nano_loop.errors import NanoError, NanoWorkerError
from nano_loop.integrations.cuda_calls.patching import is_cuda_patched, patch_cuda
from nano_loop.integrations.fabric.rank_zero import note_rank
from nano_loop.storage.trusted_files import opened_folder, path_of

# Folders of what is pickled for the workers.
PAYLOAD, WORKER_INIT = "payload", "worker_init"


@dataclass
class State:
    """Settings of the caller's process that a worker takes over, so that it computes the same."""

    settings: list[Callable[[], object]]
    threads: int | None
    warning_filters: list[Any]

    @classmethod
    def of_this_process(cls, usual_threads: int) -> State:
        """Read it.

        Parameters
        ----------
        usual_threads : int
            The compute threads that torch would have here: fewer mean that the user has chosen.
        """
        states, threads = process_states(), torch.get_num_threads()
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        settings: list[Callable[[], object]] = [
            *([patch_cuda] if is_cuda_patched() else []),
            partial(set_process_states, states, [True] * len(states)),
            partial(torch.set_default_dtype, torch.get_default_dtype()),
            partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
            partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns_only),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        ]
        return cls(settings, threads if threads < usual_threads else None, [*warnings.filters])

    def take_over(self, threads: int) -> None:
        """Put it in force in a worker, which has `threads` compute threads at the most."""
        for put_in_force in self.settings:
            put_in_force()
        if self.threads is not None:
            torch.set_num_threads(min(self.threads, threads))
        warnings.resetwarnings()
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]


@dataclass
class Assignment:
    """What a worker is to do, as it comes in the payload.

    Parameters
    ----------
    task : Task
        What every rank does.
    state : State
        torch's settings, and the random states.
    options : Options
        The options of the run.
    slots : list of RankSlot
        The slots of all ranks, by rank; empty where they are known when the ranks have joined.
    """

    task: Task
    state: State
    options: Options
    slots: list[RankSlot] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.options.processes


def write_payload(payload: object, folder: Path, names: Mapping[str, Any], worker_init: object = None) -> int:
    """Write what the workers read to new folders in `folder`.

    Parameters
    ----------
    payload : object
        What they are to do, such as an `Assignment`.
    folder : pathlib.Path
        The run's, in the shared-memory file system.
    names : mapping of str to Any
        See `Task`.
    worker_init : callable, optional
        What they call before they read the payload.

    Returns
    -------
    int
        The bytes of the large storages and arrays that were copied.

    Raises
    ------
    NanoWorkerError
        If something cannot be pickled, or a worker would import other code.
    """
    try:
        if worker_init is not None:
            (folder / WORKER_INIT).mkdir()
            dump(worker_init, folder / WORKER_INIT, {"worker_init": worker_init})
        (folder / PAYLOAD).mkdir()
        return dump(payload, folder / PAYLOAD, names)
    except NanoError as error:
        raise NanoWorkerError(str(error), rank=0) from error


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
