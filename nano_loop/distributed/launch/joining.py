"""How a run begins: in the caller's process, and in a worker process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from nano_loop.cpu import Machine
from nano_loop.distributed.files.folder import explaining_full_disk
from nano_loop.distributed.launch.assignment import Assignment, State
from nano_loop.distributed.launch.choice import choose
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.launcher import Launcher
from nano_loop.distributed.launch.task import Task
from nano_loop.distributed.launch.under_way import innermost, of_process, under_way, whole_process
from nano_loop.distributed.loaders.worker_advice import advice_of_plain_run
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat
from nano_loop.errors import NanoError, problem
from nano_loop.options import Options


def expected_ranks(options: Options) -> Ranks:
    """Return this process's place in its next run, as far as it is known before.

    Raises
    ------
    NanoConfigError
        If ``num_processes`` and the launcher do not agree.
    """
    return choose(options, nested=innermost() is not None).expected_ranks()


def prepare(options: Options, machine: Machine) -> None:
    """Start what a run with these options will need and what takes long, outside of all runs."""
    if innermost() is None and of_process() is None:
        with suppress(NanoError):  # the run raises it
            choose(options, nested=False).prepare(machine)


def current_ranks() -> Ranks:
    """Return the ranks of the innermost run of this thread.

    In a thread without a run, it is the run that has the process, and outside of all runs what torchrun, srun or mpirun
    has started.
    """
    return innermost() or of_process() or expected_ranks(Options())


@contextmanager
def joined(options: Options, machine: Machine, task: Task | None, launcher: Launcher | None = None) -> Iterator[Seat]:
    """Bring the ranks of a run together, until all of them have done the task or one has failed.

    Parameters
    ----------
    options : Options
        The options.
    machine : Machine
        What all ranks of this host may use together.
    task : Task or None
        What the other ranks do; this one does it in the body. None where there are no others to start.
    launcher : Launcher, optional
        By default the one that `nano_loop.distributed.launch.choice.choose` finds.

    Yields
    ------
    Seat
        This process's. If CPUs were assigned to it, every thread of the process is bound to them.

    Raises
    ------
    NanoError
        If a run that is under way is in the way.
    NanoWorkerError
        If another rank fails.
    """
    outer = innermost()
    if outer is not None:
        _refuse_ranks_inside(options, outer.size)
    launcher = launcher or choose(options, nested=outer is not None)
    with ExitStack() as stack:
        if launcher.needs_whole_process:
            stack.enter_context(whole_process(*_what_it_takes(launcher)))
        seat = stack.enter_context(launcher.joined(machine, task))
        stack.enter_context(_running(seat, task))
        yield seat


def run_task(assignment: Assignment, rank: int) -> None:
    """Join a run in a worker process, which its launcher has started for it, and do the task.

    What is changed in the process (torch's settings, its seeds, its files) is left changed: it ends with the run.

    Parameters
    ----------
    assignment : Assignment
        What the caller has sent.
    rank : int
        Which of the seats is this process's.
    """
    seat = assignment.seats[rank]
    folder = seat.ranks.folder
    assert folder is not None

    @contextmanager
    def connected() -> Iterator[Seat]:
        alone = seat.ranks.size == 1  # a run beside the caller, who is none of its ranks
        with nullcontext() if alone else local_group(seat.ranks, assignment.process_group_backend):
            yield seat

    state = assignment.state, seat.machine.num_threads
    run_joined(assignment.task, *state, connected(), seat.ranks.size, folder)


def run_joined(
    task: Task, state: State, threads: int, connected: AbstractContextManager[Seat], size: int, folder: Path
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
        Connects this process with the other ranks, and gives its seat.
    size : int
        How many ranks there are.
    folder : pathlib.Path
        The run's folder on this host, for what this process writes (`nano_loop.distributed.files.folder`).
    """
    state.take_over(threads)
    # An optimizer that was pickled has lost the mark of its scheduler, not the scheduler.
    warnings.filterwarnings("ignore", "Seems like `optimizer.step")
    whole = whole_process("this worker process", _of_ranks(size))
    with explaining_full_disk(folder), whole, connected as seat, _running(seat, task):
        task.run_in(seat)


@contextmanager
def _running(seat: Seat, task: Task | None) -> Iterator[None]:
    if task is not None:
        seat.ranks.context.loop = task.loop
    seat.ranks.context.common_seed = torch.initial_seed()
    is_bound = bool(seat.ranks.shares)
    with under_way(seat.ranks), advice_of_plain_run(len(seat.host.allowed)) if is_bound else nullcontext():
        yield


def _refuse_ranks_inside(options: Options, outer: int) -> None:
    if (options.num_processes or 1) == 1 and (outer == 1 or options.num_processes == 1):
        return
    given = f"a run inside a run of {outer} process{'es' * (outer > 1)}"
    needed = "only the outer run may start processes"
    raise NanoError(problem(given, needed, "Pass num_processes=1 to the inner run: each rank then runs it by itself"))


def _what_it_takes(launcher: Launcher) -> tuple[str, str]:
    """Return what asks for the whole process, as it was typed, and what the run does with it."""
    ranks, options = launcher.expected_ranks(), launcher.options
    if ranks.size > 1:
        given = f"a run of {ranks.size} processes" if options.num_processes is None else options.given["num_processes"]
        return given, _of_ranks(ranks.size)
    return options.given["cpu_for_each_process"], "a run with cpu_for_each_process, which binds all threads"


def _of_ranks(size: int) -> str:
    return f"a run of {size} processes, which has the process group and binds all threads"
