"""A run whose processes torchrun, srun or MPI has started: they find each other, and divide each host among them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.launch.external.environment import Launch, local_size
from nano_loop.distributed.launch.external.store import external_store
from nano_loop.distributed.launch.group import process_group
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.launch.shared_folder import private_folder, shared_memory_device
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.fabric import note_rank
from nano_loop.options import Options

_Mask = tuple[int, ...]  # the CPUs that a rank may use


class External(Launcher):
    """The ranks of a launch, of which this process is one: nothing is started, sent or watched.

    The external launcher ends all of its processes when one of them fails. A process group that the user has made
    already is used, and left as it is.

    Parameters
    ----------
    options : Options
        The options of the run.
    launch : Launch
        The place that the external launcher has given to this process.
    """

    def __init__(self, options: Options, launch: Launch) -> None:
        super().__init__(options)
        self.launch = launch

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        options, launch = self.options, self.launch
        if options.num_processes not in (None, launch.size):
            allowed = f"{launch.launcher} has started {launch.size} processes"
            raise NanoConfigError(problem(options.given["num_processes"], allowed, "Leave it out"))
        size = local_size(launch, os.environ)
        return Ranks(launch.rank, launch.size, local_rank=launch.rank % size, local_size=size)

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[Seat]:
        """See `Launcher.joined`."""
        launch = self.launch
        if not distributed.is_initialized():
            store = external_store(launch, os.environ, self.options.timeout)
            with joined_at(store, self.options, machine, launch) as seat:
                yield seat
            return
        if distributed.get_world_size() != launch.size:
            given = f"this process is in a process group of {distributed.get_world_size()}"
            needed = f"{launch.launcher} has started {launch.size} processes"
            raise NanoError(problem(given, needed, "Call torch.distributed.destroy_process_group() before"))
        with _seated(self.options, machine, Ranks(launch.rank, launch.size, timeout=self.options.timeout)) as seat:
            yield seat


@contextmanager
def joined_at(
    store: Store,
    options: Options,
    machine: Machine,
    launch: Launch,
    *,
    check: Callable[[], None] = lambda: None,
    address: str | None = None,
) -> Iterator[Seat]:
    """Join the other processes of a launch at a store, whoever has started them and on whichever hosts they are.

    Parameters
    ----------
    store : torch.Store
        Where all of them meet, used by no other run.
    options : Options
        The options of the run.
    machine : Machine
        What this process may use, which the launcher may have restricted already.
    launch : Launch
        The place of this process.
    check : callable
        See `Ranks`.
    address : str or None
        See `process_group`.
    """
    everyone = Ranks(launch.rank, launch.size, timeout=options.timeout, check=check)
    group = process_group(store, everyone, options.process_group_backend, address=address)
    with group, _seated(options, machine, everyone) as seat:
        yield seat


@contextmanager
def _seated(options: Options, machine: Machine, everyone: Ranks) -> Iterator[Seat]:
    """Find out who is on which host, and divide this one. Collective."""
    with ExitStack() as stack:
        found = everyone.gather((_this_host(), machine.allowed))
        here = [rank for rank, (host, _) in enumerate(found) if host == found[everyone.rank][0]]
        masks = [found[rank][1] for rank in here]
        local_rank = here.index(everyone.rank)
        shares = _shares(options, machine, here, masks)
        share = shares[local_rank] if shares else None
        ranks = Ranks(
            everyone.rank,
            everyone.size,
            local_rank=local_rank,
            local_size=len(here),
            check=everyone.check,
            timeout=everyone.timeout,
            shares=tuple(each.cpus for each in shares),
            loader_cpus=share.loader_cpus if share else (),
            folder=_common_folder(everyone, stack) if len(here) == everyone.size else None,
        )
        if share is not None:
            stack.enter_context(bound(share.cpus))
        mine = restricted(machine, share, len(here)) if share else _undivided(machine, masks)
        stack.callback(note_rank, note_rank(everyone.rank))
        yield Seat(ranks, mine, machine)


class _Host(NamedTuple):
    """What identifies a host; a container with its own shared memory counts as one."""

    name: str
    boot: str
    shared_memory: int


def _this_host() -> _Host:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return _Host(socket.gethostname(), boot, shared_memory_device())


def _shares(options: Options, machine: Machine, here: list[int], masks: list[_Mask]) -> tuple[Share, ...]:
    """Divide the host among its ranks; nothing if the launcher has done so, or has started too many of them."""
    if options.cpu_for_each_process is None:
        divided = any(each != machine.allowed for each in masks)
        if divided or len(here) > machine.num_threads or not hasattr(os, "sched_setaffinity"):
            return ()
    return shares_of(options, machine, here)


def _undivided(machine: Machine, masks: list[_Mask]) -> Machine:
    """Return the machine as one of the ranks with these masks may use it, if nano_loop binds none of them.

    A quota is common to all of them, and so are the cores where their masks are the same.
    """
    shared = machine.num_threads if all(each == machine.allowed for each in masks) else machine.quota
    return machine if shared is None else replace(machine, quota=shared / len(masks))


def _common_folder(everyone: Ranks, stack: ExitStack) -> Path:
    folder = stack.enter_context(private_folder()) if everyone.rank == 0 else None
    found = everyone.broadcast(folder)
    assert found is not None
    return found
