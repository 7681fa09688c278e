"""Starts a process for each rank except the first on the nodes of a Ray cluster; rank 0 is the caller's process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from nano_loop.config.options import Options
from nano_loop.cpu import Machine
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.system_limits import SHARED_MEMORY, limits_in_words
from nano_loop.distributed.launch.ending import running_together
from nano_loop.distributed.launch.group import refuse_existing_group
from nano_loop.distributed.launch.interrupts import Interrupts
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.worker import Assignment, State, write_payload
from nano_loop.distributed.launch.workers import Workers
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.distributed.launch_external.launcher import join_run
from nano_loop.distributed.launch_ray.caller import changes_undone_by, for_actors
from nano_loop.distributed.launch_ray.worker import deleted_with_this_process, meeting_at, threads_for, versions
from nano_loop.errors import error_message

_OLDEST = (2, 51)  # required for placement by node labels
_LATEST_NEWS = 30.0  # seconds until Ray detects that a node is lost


class RayLauncher(Launcher):
    """``num_processes`` ranks on the nodes of a Ray cluster: this process, and actors started for the run."""

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        _refuse_missing_ray(self.options)
        return super().expected_ranks()

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[RankSlot]:
        """See `Launcher.joined`."""
        options = self.options
        assert task is not None  # only runs of one process have none
        refuse_existing_group()
        with Interrupts() as interrupts, ExitStack() as stack:
            with changes_undone_by(stack):
                from nano_loop.distributed.launch_ray import cluster  # imports Ray
            with limits_in_words("the processes of a run could not be started", SHARED_MEMORY):
                folder = stack.enter_context(private_folder())
                stack.enter_context(deleted_with_this_process(folder))
                with interrupts.heard():
                    assignment = Assignment(task, State.of_this_process(machine.num_threads), _placed(options))
                    copied = write_payload(assignment, folder)
            with interrupts.heard():
                stack.enter_context(cluster.connected())
            reserved = stack.enter_context(cluster.reserved(options, interrupts.hear))
            here, threads = reserved.nodes[0], threads_for(machine, reserved.share(0))
            store = meeting_at(here.address, 0, options.timeout, is_master=True)
            at = here.address, store.port, options.timeout
            setting = {
                **for_actors(reserved.cpus, folder_is_shipped=cluster.working_folder_is_shipped()),
                "store": at,
                "payload": str(folder),
                "versions": versions(),
                "verbose": options.verbose == "all",
            }
            ranks = [*enumerate(reserved.nodes)][1:]
            writers = {node.id: rank for rank, node in reversed(ranks) if node.id != here.id}
            actors, watching = {}, meeting_at(*at)
            for rank, node in ranks:
                own = {"rank": rank, "address": node.address, "share": reserved.share(rank)}
                own["writer"] = writers.get(node.id)
                actors[rank] = cluster.Actor(rank, node, watching, {**setting, **own}, **reserved.place(rank))
                stack.callback(actors[rank].kill)
            for name, shared in cluster.put_files(folder) if writers else ():
                for rank in writers.values():
                    actors[rank].write(name, shared)
                del shared  # Ray frees it once it is written
            for actor in actors.values():
                actor.run()

            def connect(check: Callable[[], None]) -> AbstractContextManager[RankSlot]:
                launch = Launch("ray", 0, assignment.size)
                return join_run(
                    store,
                    assignment.options,
                    machine,
                    launch,
                    check=check,
                    address=here.address,
                    threads=threads,
                    folder=folder,
                )

            workers = Workers([*actors.values()], interrupts, _LATEST_NEWS)
            with running_together(workers, connect, options.timeout, task.loop) as slot:
                slot.copied = copied
                yield slot


def _placed(options: Options) -> Options:
    """Return the options for a rank to join with: its number of CPUs was decided by its placement."""
    return options.without_cpus() if isinstance(options.cpu_for_each_process, int) else options


def _refuse_missing_ray(options: Options) -> None:
    got, advice = options.as_written["distributed_backend"], 'pip install "ray>=2.51"'
    if importlib.util.find_spec("ray") is None:
        raise ImportError(error_message(got, "Ray is not installed", f"Install it: {advice}"))
    version = importlib.metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(
            error_message(f"{got} with Ray {version}", "Ray 2.51 or later is required", f"Upgrade: {advice}")
        )
