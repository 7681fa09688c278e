"""Starts a process for each rank except the first, which is the caller's process, and ends them with the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.comm.rank_slot import RankSlot, shares_of
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.system_limits import SHARED_MEMORY, limits_in_words
from nano_loop.distributed.files.folder import cache_folders_made, place_of, workers_files
from nano_loop.distributed.launch.ending import running_together
from nano_loop.distributed.launch.group import local_group, refuse_existing_group
from nano_loop.distributed.launch.interrupts import Interrupts
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.worker import PAYLOAD, WORKER_INIT, Assignment, State, write_payload
from nano_loop.distributed.launch.workers import Workers
from nano_loop.distributed.launch_local.output import standard_streams_open
from nano_loop.distributed.launch_local.process import WitnessProcess, WorkerProcess
from nano_loop.distributed.launch_local.server import Server, keep, server_for, start_early


class Local(Launcher):
    """``num_processes`` ranks on this host: this process, and workers started for the run."""

    def prepare(self, machine: Machine) -> None:
        """See `Launcher.prepare`: the fork server imports torch while the caller continues."""
        shares = shares_of(self.options, machine, range(self.options.processes))
        start_early(slots_of(machine, shares, Path(), self.options.timeout)[1])

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[RankSlot]:
        """See `Launcher.joined`."""
        options = self.options
        assert task is not None  # only runs of one process have none
        shares = shares_of(options, machine, range(options.processes))
        refuse_existing_group()
        with Interrupts() as interrupts, ExitStack() as stack:
            with limits_in_words("the processes of a run could not be started", SHARED_MEMORY):
                stack.enter_context(standard_streams_open())
                folder = stack.enter_context(private_folder())
                stack.enter_context(workers_files(folder))
                stack.enter_context(cache_folders_made())
                slots = slots_of(machine, shares, folder, options.timeout)
                server = stack.enter_context(_serving(slots[1], folder, Path(place_of(folder))))
                with interrupts.heard():
                    state = State.of_this_process(machine.num_threads)
                    # Concurrently with the other process's import of torch.
                    assignment = Assignment(task, state, options, slots)
                    slots[0].copied = write_payload(assignment, folder)
                stack.enter_context(bound(shares[0].cpus))
                started = (WorkerProcess(server, slot, options.verbose == "all") for slot in slots[1:])
                workers = Workers(started, interrupts)
                witness = WitnessProcess(server, slots[0]) if options.split_batches else None
                if witness is not None:
                    stack.callback(witness.close)
                    slots[0].ranks.context.witness = witness

            def connect(check: Callable[[], None]) -> AbstractContextManager[None]:
                slots[0].ranks.check = check
                return local_group(slots[0].ranks, options.process_group_backend)

            def forget() -> None:
                if witness is not None:
                    witness.wait_until_ready()
                for name in (PAYLOAD, WORKER_INIT):
                    shutil.rmtree(folder / name, ignore_errors=name != PAYLOAD)

            with running_together(workers, connect, options.timeout, task.loop, forget=forget):
                yield slots[0]


@contextmanager
def _serving(slot: RankSlot, *folders: Path) -> Iterator[Server]:
    """Yield the server that forks workers like a slot's, and deletes the folders if this process is killed."""
    server = server_for(slot)
    try:
        for folder in folders:
            server.ask("begin", folder=str(folder))
        yield server
    finally:
        for folder in folders:
            server.ask("finish", folder=str(folder))
        keep(server)


def slots_of(machine: Machine, shares: tuple[Share, ...], folder: Path, timeout: float) -> list[RankSlot]:
    """Return the slots of this host's ranks that have these shares and meet in this folder."""
    binds = hasattr(os, "sched_setaffinity")
    return [
        RankSlot(
            Ranks(
                rank,
                len(shares),
                local_rank=rank,
                local_size=len(shares),
                timeout=timeout,
                shares=tuple(share.cpus for share in shares) if binds else (),
                loader_cpus=share.loader_cpus if binds else (),
                folder=folder,
            ),
            restricted(machine, share, len(shares)),
            machine,
        )
        for rank, share in enumerate(shares)
    ]
