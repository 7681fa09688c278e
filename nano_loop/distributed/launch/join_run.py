"""The start of a run in the caller's process, alongside and inside other runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.active_runs import innermost, of_process, of_ranks, running, whole_process
from nano_loop.distributed.launch.launcher import Alone, Launcher, Task
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.errors import NanoError, error_message


def choose(options: Options, *, inside_run: bool) -> Launcher:
    """Return the launcher of a run; inside another run, an external launcher's processes are in use already."""
    # Import launchers of several processes lazily: a run of one process starts 25 ms earlier.
    launch = None if inside_run else found_launch(os.environ)
    if launch is not None:
        from nano_loop.distributed.launch_external.launcher import External

        return External(options, launch)
    if options.processes == 1:
        return Alone(options)
    if options.distributed_backend == "ray":
        from nano_loop.distributed.launch_ray.launcher import RayLauncher

        return RayLauncher(options)
    from nano_loop.distributed.launch_local.launcher import Local

    return Local(options)


def expected_ranks(options: Options) -> Ranks:
    """Return this process's place in its next run; raise a `NanoConfigError` if the launcher has other processes."""
    return choose(options, inside_run=innermost() is not None).expected_ranks()


def prepare(options: Options, machine: Machine) -> None:
    """Start the slow parts of a run with these options in advance, outside of all runs."""
    if innermost() is None and of_process() is None:
        with suppress(NanoError):  # the run raises it
            choose(options, inside_run=False).prepare(machine)


def current_ranks() -> Ranks:
    """Return the ranks of this thread's innermost run, of the process's run, or of torchrun, srun or mpirun."""
    return innermost() or of_process() or expected_ranks(Options())


@contextmanager
def joined(
    options: Options, machine: Machine, task: Task | None, launcher: Launcher | None = None
) -> Iterator[RankSlot]:
    """Connect the ranks of a run until all of them have finished the task or one has failed.

    Other ranks run the task, which is None if there are none to start; this one runs it in the body. `machine` is the
    part available to all ranks of this host together. If CPUs are assigned to the slot, all threads of the process are
    bound to them.
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
    if options.processes == 1 and (outer == 1 or options.num_processes == 1):
        return
    got = f"a run inside a run of {outer} process{'es' * (outer > 1)}"
    expected = "only the outer run may start processes"
    raise NanoError(
        error_message(got, expected, "Pass num_processes=1 to the inner run: each rank then runs it separately")
    )


def _what_it_takes(launcher: Launcher) -> tuple[str, str]:
    """Return the option that requires the whole process, as it was typed, and the purpose that it is used for."""
    ranks, options = launcher.expected_ranks(), launcher.options
    if ranks.size > 1:
        got = (
            f"a run of {ranks.size} processes" if options.num_processes is None else options.as_written["num_processes"]
        )
        return got, of_ranks(ranks.size)
    return options.as_written["cpu_for_each_process"], "a run with cpu_for_each_process, which binds all threads"
