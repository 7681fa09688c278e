"""The begin of a run in the caller's process, beside and inside other runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.active_runs import innermost, of_process, of_ranks, running, whole_process
from nano_loop.distributed.launch.choice import choose
from nano_loop.distributed.launch.launcher import Launcher
from nano_loop.distributed.launch.task import Task
from nano_loop.errors import NanoError, error_message


def expected_ranks(options: Options) -> Ranks:
    """Return this process's place in its next run, as far as it is known before.

    Raises
    ------
    NanoConfigError
        If ``num_processes`` and the launcher do not agree.
    """
    return choose(options, inside_run=innermost() is not None).expected_ranks()


def prepare(options: Options, machine: Machine, modules: Sequence[str]) -> None:
    """Start what takes long of a run with these options, whose task takes these modules, outside of all runs."""
    if innermost() is None and of_process() is None:
        with suppress(NanoError):  # the run raises it
            choose(options, inside_run=False).prepare(machine, modules)


def current_ranks() -> Ranks:
    """Return the ranks of the innermost run of this thread.

    In a thread without a run, it is the run that has the process, and outside of all runs what torchrun, srun or mpirun
    has started.
    """
    return innermost() or of_process() or expected_ranks(Options())


@contextmanager
def joined(
    options: Options, machine: Machine, task: Task | None, launcher: Launcher | None = None
) -> Iterator[RankSlot]:
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
    RankSlot
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
    launcher = launcher or choose(options, inside_run=outer is not None)
    with ExitStack() as stack:
        if launcher.needs_whole_process:
            stack.enter_context(whole_process(*_what_it_takes(launcher)))
        slot = stack.enter_context(launcher.joined(machine, task))
        stack.enter_context(running(slot, task))
        yield slot


def _refuse_ranks_inside(options: Options, outer: int) -> None:
    if (options.num_processes or 1) == 1 and (outer == 1 or options.num_processes == 1):
        return
    got = f"a run inside a run of {outer} process{'es' * (outer > 1)}"
    expected = "only the outer run may start processes"
    raise NanoError(
        error_message(got, expected, "Pass num_processes=1 to the inner run: each rank then runs it by itself")
    )


def _what_it_takes(launcher: Launcher) -> tuple[str, str]:
    """Return what asks for the whole process, as it was typed, and what the run does with it."""
    ranks, options = launcher.expected_ranks(), launcher.options
    if ranks.size > 1:
        got = (
            f"a run of {ranks.size} processes" if options.num_processes is None else options.as_written["num_processes"]
        )
        return got, of_ranks(ranks.size)
    return options.as_written["cpu_for_each_process"], "a run with cpu_for_each_process, which binds all threads"
