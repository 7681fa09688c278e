"""Starts a process for each rank but the first, which is the caller's own, and ends them with the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.launch.assignment import Assignment, State
from nano_loop.distributed.launch.checkpoints import checkpoints_noted
from nano_loop.distributed.launch.ending import running_together
from nano_loop.distributed.launch.group import local_group, refuse_existing_group
from nano_loop.distributed.launch.interrupts import undisturbed_ending, unheard_interrupts
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.launch.local.process import started
from nano_loop.distributed.launch.local.start import Start
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.workers import Workers
from nano_loop.distributed.payload.payload import dump
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.errors import NanoError, NanoWorkerError

PAYLOAD = "payload"  # the folder of it, beside the store


class Local(Launcher):
    """``num_processes`` ranks on this host: this process, and workers that are started for the run."""

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        count = self.options.num_processes or 1
        return Ranks(size=count, local_size=count)

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[Seat]:
        """See `Launcher.joined`."""
        options = self.options
        assert task is not None  # what has none is a run of one process
        shares = shares_of(options, machine, range(options.num_processes or 1))
        refuse_existing_group()
        with undisturbed_ending() as begin_ending, ExitStack() as stack:
            folder = stack.enter_context(private_folder())
            seats = _seats(machine, shares, folder, options.timeout)
            processes = started([Start.of_seat(seat, options.verbose == "all") for seat in seats[1:]])
            workers = Workers(processes)
            stack.callback(workers.end)
            state = State.of_this_process(machine.num_threads)
            _send(Assignment(task, seats, state, options.process_group_backend), folder)  # while they import torch
            for process in processes:
                process.go()
            stack.enter_context(bound(shares[0].cpus))
            workers.wait_until_ready(options.timeout)
            shutil.rmtree(folder / PAYLOAD)  # every worker has mapped it: whatever happens now, its memory is freed
            stack.enter_context(unheard_interrupts(workers.interrupt))
            stack.enter_context(checkpoints_noted(folder))
            stack.callback(begin_ending)
            joining = _joined_first(seats[0], options.process_group_backend)
            yield stack.enter_context(running_together(workers, joining, options.timeout))


@contextmanager
def _joined_first(seat: Seat, backend: str | None) -> Iterator[Seat]:
    with local_group(seat.ranks, backend):
        yield seat


def _seats(machine: Machine, shares: tuple[Share, ...], folder: Path, timeout: float) -> list[Seat]:
    binds = hasattr(os, "sched_setaffinity")
    return [
        Seat(
            Ranks(
                rank,
                len(shares),
                local_rank=rank,
                local_size=len(shares),
                timeout=timeout,
                shares=tuple(each.cpus for each in shares) if binds else (),
                loader_cpus=share.loader_cpus if binds else (),
                folder=folder,
            ),
            restricted(machine, share, len(shares)),
            machine,
        )
        for rank, share in enumerate(shares)
    ]


def _send(assignment: Assignment, folder: Path) -> None:
    """Write the payload, which no worker reads before `WorkerProcess.go`."""
    (folder / PAYLOAD).mkdir()
    try:
        dump(assignment, folder / PAYLOAD, assignment.task.names)
    except NanoError as error:
        raise NanoWorkerError(str(error), rank=0) from error
