"""Starts the workers of a run from the caller's process, which is rank 0, and lets them end with it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.launch.assignment import Assignment, State
from nano_loop.distributed.launch.checkpoints import checkpoints_noted
from nano_loop.distributed.launch.child import Start
from nano_loop.distributed.launch.ending import ending_together
from nano_loop.distributed.launch.group import local_group, refuse_existing_group
from nano_loop.distributed.launch.interrupts import undisturbed_ending, unheard_interrupts
from nano_loop.distributed.launch.workers import Workers
from nano_loop.distributed.payload.payload import dump
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.environment import without_launch
from nano_loop.errors import NanoError, NanoWorkerError
from nano_loop.options import Options

PAYLOAD = "payload"  # the folder of it, beside the store
# They would put every process on the same CPUs, or stop a worker at a prompt.
_NOT_FOR_WORKERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "PYTHONINSPECT")


@dataclass
class Call:
    """The call that a run makes on every rank.

    Parameters
    ----------
    loop : TorchNano
        Whose ``train`` is called.
    args, kwargs : tuple and dict
        Its arguments.
    names : dict
        The user's own arguments by name, for a message about one that cannot travel.
    """

    loop: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Mapping[str, Any]


@contextmanager
def launched(config: Options, machine: Machine, call: Call, shared_memory: Path) -> Iterator[Seat]:
    """Start a worker for each rank but the first, and take the first seat.

    Parameters
    ----------
    config : Options
        The options.
    machine : Machine
        What all ranks may use together.
    call : Call
        What the workers are to do.
    shared_memory : pathlib.Path
        The folder in which ranks of one host share memory.
    """
    shares = shares_of(config, machine, range(config.num_processes or 1))
    with undisturbed_ending() as begin_ending, ExitStack() as stack:
        folder = _folder(stack, shared_memory)
        seats = _seats(config, machine, shares, folder)
        refuse_existing_group()
        workers = Workers([_start(config, seat) for seat in seats[1:]])
        stack.callback(workers.end)
        _send(machine, seats, call)  # while they import torch
        workers.go()
        stack.enter_context(bound(shares[0].cpus))
        workers.wait_until_ready(config.timeout)
        shutil.rmtree(folder / PAYLOAD)  # every worker has mapped it: whatever happens now, its memory is freed
        seats[0].ranks.check = workers.check
        stack.enter_context(unheard_interrupts(workers.interrupt))
        stack.enter_context(checkpoints_noted(folder))
        stack.callback(begin_ending)
        with local_group(config, seats[0].ranks), ending_together(workers):
            yield seats[0]
        with ending_together(workers, has_returned=True):
            workers.wait_until_finished(config.timeout)


def _seats(config: Options, machine: Machine, shares: tuple[Share, ...], folder: Path) -> list[Seat]:
    binds = hasattr(os, "sched_setaffinity")
    return [
        Seat(
            Ranks(
                rank,
                len(shares),
                local_rank=rank,
                local_size=len(shares),
                timeout=config.timeout,
                shares=tuple(each.cpus for each in shares) if binds else (),
                loader_cpus=share.loader_cpus if binds else (),
                folder=folder,
            ),
            restricted(machine, share, len(shares)),
            machine,
        )
        for rank, share in enumerate(shares)
    ]


def _folder(stack: ExitStack, shared_memory: Path) -> Path:
    """Make a private folder that all ranks can map files of: in memory where there is a file system there."""
    parent = shared_memory if os.access(shared_memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f"nano_loop-{os.getpid()}-", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _send(machine: Machine, seats: list[Seat], call: Call) -> None:
    """Write the payload, of which no worker reads before it is told to."""
    assert seats[0].ranks.folder is not None
    folder = seats[0].ranks.folder / PAYLOAD
    folder.mkdir()
    state = State.of_this_process(machine.num_threads)
    try:
        dump(Assignment((call.loop, call.args, call.kwargs), seats, state), folder, call.names)
    except NanoError as error:
        raise NanoWorkerError(str(error), rank=0) from error


def _start(config: Options, seat: Seat) -> Start:
    environ = {name: value for name, value in without_launch(os.environ).items() if name not in _NOT_FOR_WORKERS}
    defaults = {"OMP_NUM_THREADS": str(seat.machine.num_threads), "TQDM_DISABLE": "1", "PYTHONBREAKPOINT": "0"}
    ranks = seat.ranks
    return Start(
        rank=ranks.rank,
        cpus=list(ranks.shares[ranks.local_rank]) if ranks.shares else [],
        folder=str(ranks.folder),
        path=[os.path.abspath(each) for each in sys.path],
        argv=sys.argv,
        environ={**defaults, **environ},
        verbose=config.verbose == "all",
    )
