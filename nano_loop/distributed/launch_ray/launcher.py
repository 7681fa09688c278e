"""Starts a process for each rank but the first on the nodes of a Ray cluster; rank 0 is the caller's own process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.distributed.comm.limits import SHARED_MEMORY, limits_in_words
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.assignment import Assignment, State, write_payload
from nano_loop.distributed.launch.ending import running_together
from nano_loop.distributed.launch.group import refuse_existing_group
from nano_loop.distributed.launch.interrupts import Interrupts
from nano_loop.distributed.launch.launcher import Launcher
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.task import Task
from nano_loop.distributed.launch.workers import Workers
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.distributed.launch_external.launcher import Terms, join_run
from nano_loop.distributed.launch_ray.caller import changes_undone_by
from nano_loop.distributed.launch_ray.worker import deleted_with_this_process, threads_for
from nano_loop.errors import error_message

_OLDEST = (2, 51)  # it places by the labels of nodes


class RayLauncher(Launcher):
    """``num_processes`` ranks on the nodes of a Ray cluster: this process, and actors that are started for the run."""

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        _refuse_missing_ray(self.options)
        return super().expected_ranks()

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[RankSlot]:
        """See `Launcher.joined`."""
        options = self.options
        assert task is not None  # what has none is a run of one process
        refuse_existing_group()
        with Interrupts() as interrupts, ExitStack() as stack:
            with changes_undone_by(stack):
                from nano_loop.distributed.launch_ray import cluster, starting  # which import Ray
            with limits_in_words("the processes of a run could not be started", SHARED_MEMORY):
                folder = stack.enter_context(private_folder())
                stack.enter_context(deleted_with_this_process(folder))
                with interrupts.heard():
                    assignment = Assignment(task, State.of_this_process(machine.num_threads), _placed(options))
                    copied = write_payload(assignment, folder, task.names, options.worker_init).copied
            with interrupts.heard():
                stack.enter_context(cluster.connected())
            actors, placement, folders = stack.enter_context(starting.started(options, folder, interrupts.hear))
            address, threads = placement.nodes[0].address, threads_for(machine, placement.share(0))
            waiting = timedelta(seconds=options.timeout)
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=waiting)
            for actor in actors:
                actor.run(folders[actor], address, store.port, actor.node.address, placement.share(actor.rank))

            def connect(check: Callable[[], None]) -> AbstractContextManager[RankSlot]:
                terms = Terms(check, address, threads, watched=True, parent=folder)
                launch = Launch("ray", 0, assignment.size)
                return join_run(store, assignment.options, machine, launch, terms)

            def forget() -> None:
                for actor in actors:
                    actor.forget_payload()

            workers = Workers(actors)
            with running_together(workers, connect, options.timeout, interrupts, task.loop, forget=forget) as slot:
                slot.copied = copied
                yield slot


def _placed(options: Options) -> Options:
    """Return the options as a rank joins with: how many CPUs it has was decided when it was placed."""
    return options.without_cpus() if isinstance(options.cpu_for_each_process, int) else options


def _refuse_missing_ray(options: Options) -> None:
    got, advice = options.as_written["distributed_backend"], 'pip install "nano-loop[ray]"'
    if importlib.util.find_spec("ray") is None:
        raise ImportError(error_message(got, "Ray is not installed", f"Install it: {advice}"))
    version = importlib.metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(
            error_message(f"{got} with Ray {version}", "it takes Ray 2.51 or later", f"Upgrade: {advice}")
        )
