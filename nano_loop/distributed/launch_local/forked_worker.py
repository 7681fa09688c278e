"""A worker process, from its fork on."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.launch.assignment import Assignment
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.reports import CUT_OFF, Reporter
from nano_loop.distributed.launch.worker import work
from nano_loop.distributed.launch_local import stack_dump


class WorkerRequest(NamedTuple):
    """A request of the caller's for a worker, with the descriptors that have come with it."""

    start: dict[str, Any]  # what `nano_loop.distributed.launch_local.start.start_of` has returned
    channel: socket.socket
    streams: list[int]  # its reports, its standard output, its standard error

    def close(self) -> None:
        """Close the descriptors in this process."""
        self.close_streams()
        self.channel.close()

    def close_streams(self) -> None:
        """Close those that are the worker's alone."""
        for descriptor in self.streams:
            os.close(descriptor)


def work_for(request: WorkerRequest) -> None:
    """Do the work of a rank in this process, and end it."""
    request.channel.close()
    start, (reports, *streams) = request.start, request.streams
    _take_streams(*streams)
    _take_over(start)
    stack_dump.dump_on_signal(start["folder"], start["rank"])
    folder, reporter = Path(start["folder"]), Reporter(start["rank"], partial(_write, reports))
    work(reporter, folder, _joined, payload=folder)
    # Threads of the user's may be running; there is nothing to clean up that rank 0 does not.
    os._exit(CUT_OFF if reporter.is_cut_off else 0)


def _take_over(start: dict[str, Any]) -> None:
    """Take over from the caller's process what a process has from its start."""
    if start["cpus"]:
        os.sched_setaffinity(0, start["cpus"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(start["environ"])
    if os.environ.get("OMP_NUM_THREADS", "") != before and os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read another number
    if start["working_folder"] is not None:
        os.chdir(start["working_folder"])
    sys.argv[:] = start["argv"]
    if start["script"] is not None:  # which processes that are spawned import
        sys.modules["__main__"].__file__ = start["script"]
    importlib.invalidate_caches()


@contextlib.contextmanager
def _joined(assignment: Assignment, rank: int) -> Iterator[RankSlot]:
    """Connect a worker with the other ranks; a run beside the caller, who is none of its ranks, may have one alone."""
    slot = assignment.slots[rank]
    backend = assignment.options.process_group_backend
    with contextlib.nullcontext() if slot.ranks.size == 1 else local_group(slot.ranks, backend):
        yield slot


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _take_streams(output: int, errors: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
