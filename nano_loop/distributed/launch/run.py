"""One run: alone, with workers of its own, as one of them, or among processes that somebody else has started."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from nano_loop.cpu import Machine, bound, restricted
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.launcher import Call, launched
from nano_loop.distributed.launch.outside import joined_outside
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.environment import outside_launch
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.options import Options

SHARED_MEMORY = Path("/dev/shm")


class _Thread(threading.local):
    """How many ranks each run has that is under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.sizes: list[int] = []


_thread = _Thread()
_taken: list[Seat] = []  # the seat of this process, where it is a worker


def take_seat(seat: Seat) -> None:
    """Let the next run in this process be that of a worker."""
    _taken.append(seat)


def expected_ranks(config: Options) -> Ranks:
    """Return this process's place in its next run, as far as it is known before.

    Raises
    ------
    NanoConfigError
        If ``num_processes`` and the launcher do not agree.
    """
    launch = outside_launch(os.environ)
    if launch is None or _thread.sizes:
        count = config.num_processes or 1
        return Ranks(size=count, local_size=count)
    if config.num_processes not in (None, launch.size):
        allowed = f"{launch.launcher} has started {launch.size} processes"
        raise NanoConfigError(problem(config.given["num_processes"], allowed, "Leave it out"))
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    size = int(local) if local.isdecimal() and int(local) else launch.size
    return Ranks(launch.rank, launch.size, local_rank=launch.rank % size, local_size=size)


@contextmanager
def joined(config: Options, machine: Machine, call: Call) -> Iterator[Seat]:
    """Bring the ranks of a run together, until all of them have made the call or one has failed.

    Parameters
    ----------
    config : Options
        The options.
    machine : Machine
        What all ranks of this host may use together.
    call : Call
        What workers are to do.

    Yields
    ------
    Seat
        This process's. While it is held, every thread of the process is bound to the seat's CPUs.

    Raises
    ------
    NanoWorkerError
        If another rank fails.
    """
    with ExitStack() as stack:
        seat = stack.enter_context(_way_in(config, machine, call))
        seat.ranks.common_seed = torch.initial_seed()
        _thread.sizes.append(seat.ranks.size)
        stack.callback(_thread.sizes.pop)
        yield seat


def _way_in(config: Options, machine: Machine, call: Call) -> AbstractContextManager[Seat]:
    launch = outside_launch(os.environ)
    if _thread.sizes:
        _refuse_ranks_inside(config)
        return _alone(config, machine)
    if _taken:
        return _as_worker(config, _taken.pop())
    if launch is not None:
        return joined_outside(config, machine, launch, SHARED_MEMORY)
    return (
        _alone(config, machine) if (config.num_processes or 1) == 1 else launched(config, machine, call, SHARED_MEMORY)
    )


@contextmanager
def _alone(config: Options, machine: Machine) -> Iterator[Seat]:
    if config.cpu_for_each_process is None:
        yield Seat(Ranks(), machine, machine)
        return
    (share,) = shares_of(config, machine, [0])
    with bound(share.cpus):
        ranks = Ranks(shares=(share.cpus,), loader_cpus=share.loader_cpus)
        yield Seat(ranks, restricted(machine, share, 1), machine)


def _refuse_ranks_inside(config: Options) -> None:
    if (config.num_processes or 1) == 1 and (_thread.sizes[-1] == 1 or config.num_processes == 1):
        return
    given = f"a run inside a run of {_thread.sizes[-1]} process{'es' * (_thread.sizes[-1] > 1)}"
    needed = "processes are started by the outer one alone"
    raise NanoError(problem(given, needed, "Give the inner one num_processes=1: each rank then runs it for itself"))


@contextmanager
def _as_worker(config: Options, seat: Seat) -> Iterator[Seat]:
    with local_group(config, seat.ranks):
        yield seat
