"""One run of several ranks: starts the others or joins them, and sees to it that all of them end together."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nano_loop.config import NanoConfig
from nano_loop.cpu import Machine, Share, bound, given_shares, partition, restricted
from nano_loop.distributed.launch.assignment import Assignment, State
from nano_loop.distributed.launch.failure import Kind, kind_of
from nano_loop.distributed.launch.group import local_store, process_group, refuse_existing_group
from nano_loop.distributed.launch.interrupts import unheard_interrupts
from nano_loop.distributed.launch.outside import joined_outside
from nano_loop.distributed.launch.workers import Start, Workers
from nano_loop.distributed.payload.payload import dump
from nano_loop.distributed.ranks import RankLeftError, Ranks
from nano_loop.distributed.seat import Seat
from nano_loop.environment import outside_launch, without_launch
from nano_loop.errors import NanoConfigError, NanoError, NanoWorkerError, problem

SHARED_MEMORY = Path("/dev/shm")
PAYLOAD = "payload"  # the folder of it, beside the store
_SAME_STEPS = "all ranks have to take the same number of steps"
# They would put every process on the same CPUs, or stop a worker at a prompt.
_NOT_FOR_WORKERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "PYTHONINSPECT")
_ECHO_WAITS = 3.0  # seconds that an error which another rank has caused waits for that rank's report


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


class _Thread(threading.local):
    """How many ranks each run has that is under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.sizes: list[int] = []


_thread = _Thread()
_taken: list[Seat] = []  # the seat of this process, where it is a worker


def take_seat(seat: Seat) -> None:
    """Let the next run in this process be that of a worker."""
    _taken.append(seat)


def expected_ranks(config: NanoConfig) -> Ranks:
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
def joined(config: NanoConfig, machine: Machine, call: Call) -> Iterator[Seat]:
    """Bring the ranks of a run together, until all of them have made the call or one has failed.

    Parameters
    ----------
    config : NanoConfig
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


def _way_in(config: NanoConfig, machine: Machine, call: Call) -> AbstractContextManager[Seat]:
    launch = outside_launch(os.environ)
    if _thread.sizes:
        _refuse_ranks_inside(config)
        return _alone(config, machine)
    if _taken:
        return _as_worker(config, _taken.pop())
    if launch is not None:
        return joined_outside(config, machine, launch, SHARED_MEMORY)
    return _alone(config, machine) if (config.num_processes or 1) == 1 else _launched(config, machine, call)


@contextmanager
def _alone(config: NanoConfig, machine: Machine) -> Iterator[Seat]:
    if config.cpu_for_each_process is None:
        yield Seat(Ranks(), machine, machine)
        return
    (share,) = _shares(config, machine, 1)
    with bound(share.cpus):
        ranks = Ranks(shares=(share.cpus,), loader_cpus=share.loader_cpus)
        yield Seat(ranks, restricted(machine, share, 1), machine)


def _refuse_ranks_inside(config: NanoConfig) -> None:
    if (config.num_processes or 1) == 1 and (_thread.sizes[-1] == 1 or config.num_processes == 1):
        return
    given = f"a run inside a run of {_thread.sizes[-1]} process{'es' * (_thread.sizes[-1] > 1)}"
    needed = "processes are started by the outer one alone"
    raise NanoError(problem(given, needed, "Give the inner one num_processes=1: each rank then runs it for itself"))


@contextmanager
def _as_worker(config: NanoConfig, seat: Seat) -> Iterator[Seat]:
    with _local_group(config, seat.ranks):
        yield seat


def _local_group(config: NanoConfig, ranks: Ranks) -> AbstractContextManager[None]:
    assert ranks.folder is not None
    store = local_store(ranks.folder, ranks.size)
    return process_group(config.process_group_backend, store, ranks.rank, ranks.size, config.timeout, local=True)


@contextmanager
def _launched(config: NanoConfig, machine: Machine, call: Call) -> Iterator[Seat]:
    count = config.num_processes or 1
    shares = _shares(config, machine, count)
    with ExitStack() as stack:
        folder = _folder(stack)
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
        with _local_group(config, seats[0].ranks), _ending_together(workers):
            yield seats[0]
        with _ending_together(workers, has_returned=True):
            workers.wait_until_finished(config.timeout)


def _shares(config: NanoConfig, machine: Machine, count: int) -> tuple[Share, ...]:
    if config.cpu_for_each_process is not None:
        _refuse_where_nothing_can_be_bound(config)
        return given_shares(machine, config.cpu_for_each_process)
    return partition(machine, count)


def _refuse_where_nothing_can_be_bound(config: NanoConfig) -> None:
    if not hasattr(os, "sched_setaffinity"):
        needed = f"{sys.platform} has no way to bind a process to CPUs"
        raise NanoConfigError(problem(config.given["cpu_for_each_process"], needed, "Leave it out"))


def _seats(config: NanoConfig, machine: Machine, shares: tuple[Share, ...], folder: Path) -> list[Seat]:
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


def _folder(stack: ExitStack) -> Path:
    """Make a private folder that all ranks can map files of: in memory where there is a file system there."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="nano_loop-", dir=parent))
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


def _start(config: NanoConfig, seat: Seat) -> Start:
    environ = {name: value for name, value in without_launch(os.environ).items() if name not in _NOT_FOR_WORKERS}
    defaults = {"OMP_NUM_THREADS": str(seat.machine.num_threads), "TQDM_DISABLE": "1"}
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


@contextmanager
def _ending_together(workers: Workers, *, has_returned: bool = False) -> Iterator[None]:
    """Kill the workers where rank 0 raises, and raise what came first."""
    try:
        yield
    except BaseException as error:
        cause = _cause_of(error, workers, has_returned)
        workers.kill()
        if cause is error:
            raise
        raise cause from cause.__cause__ or error


def _cause_of(error: BaseException, workers: Workers, has_returned: bool) -> BaseException:
    """Return what is to be raised for an exception of rank 0: itself, or what another rank has done."""
    if workers.interrupted:
        return KeyboardInterrupt()
    if has_returned:
        return _left_behind(error, workers)
    if kind_of(error) is Kind.CAUSE:
        return error
    failure = workers.await_failure(_ECHO_WAITS)
    if failure is not None and failure.kind is Kind.CAUSE:
        return failure.as_error()
    if isinstance(error, RankLeftError):
        return NanoWorkerError(str(error), rank=error.rank)
    for rank in workers.finished:
        given = f"rank {rank} has returned from train, and rank 0 waits for it"
        return NanoWorkerError(problem(given, _SAME_STEPS, "Let none leave the loop earlier"), rank=rank)
    return failure.as_error() if failure is not None else error


def _left_behind(error: BaseException, workers: Workers) -> BaseException:
    """Say of a worker that lost its connection what that means when rank 0 has returned from the loop."""
    failure = workers.await_failure(0)
    if failure is None or failure.kind is Kind.CAUSE:
        return error
    given = f"rank 0 has returned from train, and rank {failure.rank} waits for it"
    advice = "Let none leave the loop earlier"
    return NanoWorkerError(problem(given, _SAME_STEPS, advice), rank=failure.rank, traceback=failure.traceback)
