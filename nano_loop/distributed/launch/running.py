"""The task of a run in a worker process, from the state that it takes over to its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from nano_loop.data.workers import advice_of_plain_run
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.private_files import explaining
from nano_loop.distributed.launch.active_runs import active_run, whole_process
from nano_loop.distributed.launch.assignment import Assignment, State
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.task import Task


def run_task(assignment: Assignment, rank: int) -> None:
    """Join a run in a worker process, which its launcher has started for it, and do the task.

    What is changed in the process (torch's settings, its seeds, its files) is left changed: it ends with the run.

    Parameters
    ----------
    assignment : Assignment
        What the caller has sent.
    rank : int
        Which of the slots is this process's.
    """
    slot = assignment.slots[rank]
    folder = slot.ranks.folder
    assert folder is not None

    @contextmanager
    def connected() -> Iterator[RankSlot]:
        alone = slot.ranks.size == 1  # a run beside the caller, who is none of its ranks
        with nullcontext() if alone else local_group(slot.ranks, assignment.process_group_backend):
            yield slot

    state = assignment.state, slot.machine.num_threads
    run_joined(assignment.task, *state, connected(), slot.ranks.size, folder)


def run_joined(
    task: Task, state: State, threads: int, connected: AbstractContextManager[RankSlot], size: int, folder: Path
) -> None:
    """Do a task in a worker process; see `run_task`.

    Parameters
    ----------
    task : Task
        What to do.
    state : State
        That of the caller's process.
    threads : int
        The most compute threads that this process may have.
    connected : context manager
        Connects this process with the other ranks, and gives its slot.
    size : int
        How many ranks there are.
    folder : pathlib.Path
        The run's folder on this host, for what this process writes (`nano_loop.distributed.files.folder`).
    """
    state.take_over(threads)
    # An optimizer that was pickled has lost the mark of its scheduler, not the scheduler.
    warnings.filterwarnings("ignore", "Seems like `optimizer.step")
    whole = whole_process("this worker process", of_ranks(size))
    with explaining(folder), whole, connected as slot, running(slot, task):
        task.run_in(slot)


@contextmanager
def running(slot: RankSlot, task: Task | None) -> Iterator[None]:
    """Note that this process is a rank of a run, for the body."""
    if task is not None:
        slot.ranks.context.loop = task.loop
    slot.ranks.context.common_seed = torch.initial_seed()
    is_bound = bool(slot.ranks.shares)
    with active_run(slot.ranks), advice_of_plain_run(len(slot.host.allowed)) if is_bound else nullcontext():
        yield


def of_ranks(size: int) -> str:
    """Return what a run of several processes does with this one, for the message of a run that it is in the way of."""
    return f"a run of {size} processes, which has the process group and binds all threads"
