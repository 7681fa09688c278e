"""A worker process, from its fork on."""

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
from nano_loop.integrations.fabric.rank_zero import note_rank


def work_for(start: dict[str, Any], stream: Stream, output: int, errors: int) -> None:
    """Do the work of a rank in this process, and end it.

    Parameters
    ----------
    start : dict
        What `nano_loop.distributed.launch_local.start.start_of` has returned.
    stream : Stream
        Its stream to rank 0.
    output, errors : int
        The descriptors of its standard output and its standard error.
    """
    _take_streams(output, errors)
    _take_over(start)
    stack_dump.dump_on_signal(start["folder"], start["rank"])
    reporter = Reporter(start["rank"], stream.send)
    folder = Path(start["folder"])
    work(reporter, folder, functools.partial(_joined, reporter), payload=folder)
    # Threads of the user's may be running; there is nothing to clean up that rank 0 does not.
    os._exit(0)


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
def _joined(reporter: Reporter, assignment: Assignment, rank: int) -> Iterator[RankSlot]:
    """Connect a worker with the other ranks; the one after the last is the witness, and is alone."""
    if rank == assignment.size:
        note_rank(None)
        _end_at_sockets(reporter)
        first = assignment.slots[0]
        yield RankSlot(Ranks(context=RunContext(witness=reporter.report)), first.machine, first.host)
        return
    slot = assignment.slots[rank]
    with local_group(slot.ranks, assignment.options.process_group_backend):
        yield slot


def _end_at_sockets(reporter: Reporter) -> None:
    """End this process, whose other effects are dropped, before it talks to another host."""
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
