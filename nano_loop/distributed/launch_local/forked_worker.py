"""The code of a worker process from its fork on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks, RunContext
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.stream import Reporter, Stream
from nano_loop.distributed.launch.worker import Assignment, work
from nano_loop.distributed.launch_local import stack_dump
from nano_loop.integrations.rank_zero import note_rank


def work_for(start: dict[str, Any], stream: Stream, output: int, errors: int) -> None:
    """Run a rank with the settings of `start_of` in this process, with descriptors for its output, then end it."""
    _take_streams(output, errors)
    _take_over(start)
    stack_dump.dump_on_signal(start["folder"], start["rank"])
    reporter = Reporter(start["rank"], stream.send)
    folder = Path(start["folder"])
    work(reporter, folder, functools.partial(_joined, reporter), payload=folder)
    # User threads may be running, and rank 0 does all cleanup.
    os._exit(0)


def _take_over(start: dict[str, Any]) -> None:
    """Apply the process-level settings of the caller's process."""
    if start["cpus"]:
        os.sched_setaffinity(0, start["cpus"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(start["environ"])
    if os.environ.get("OMP_NUM_THREADS", "") != before and os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP was loaded with another number
    if start["working_folder"] is not None:
        os.chdir(start["working_folder"])
    sys.argv[:] = start["argv"]
    if start["script"] is not None:  # spawned processes import it
        sys.modules["__main__"].__file__ = start["script"]
    importlib.invalidate_caches()


@contextlib.contextmanager
def _joined(reporter: Reporter, assignment: Assignment, rank: int) -> Iterator[RankSlot]:
    """Connect a worker with the other ranks; the worker after the last rank is the witness, which is not connected."""
    if rank == assignment.size:
        note_rank(0)
        _end_at_sockets(reporter)
        first = assignment.slots[0]
        yield RankSlot(Ranks(context=RunContext(witness=reporter.report)), first.machine, first.host)
        return
    slot = assignment.slots[rank]
    with local_group(slot.ranks, assignment.options.process_group_backend):
        yield slot


def _end_at_sockets(reporter: Reporter) -> None:
    """End this process before it contacts another host; its other side effects are discarded."""
    process = os.getpid()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.bind", "socket.sendto") and isinstance(arguments[1], tuple):
            if os.getpid() == process:
                reporter.report("ends", why=f"it opens a socket ({event})")
            os._exit(0)

    sys.addaudithook(audit)


def _take_streams(output: int, errors: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
