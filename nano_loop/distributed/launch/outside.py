"""A run whose processes torchrun, srun or MPI has started: they find each other, and divide each host among them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import distributed

from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.launch.group import outside_store, process_group
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.environment import Launch
from nano_loop.errors import NanoError, problem
from nano_loop.fabric import note_rank
from nano_loop.options import Options

_Mask = tuple[int, ...]  # the CPUs that a rank may use


class _Host(NamedTuple):
    """What tells two hosts apart, containers with memory of their own included."""

    name: str
    boot: str
    shared_memory: int


@contextmanager
def joined_outside(config: Options, machine: Machine, launch: Launch, shared_memory: Path) -> Iterator[Seat]:
    """Join the other processes of a launch.

    A process group that the user has made already is used, and left as it is.

    Parameters
    ----------
    config : Options
        The options.
    machine : Machine
        What this process may use, which the launcher may have restricted already.
    launch : Launch
        The place that the launcher gave to this process.
    shared_memory : pathlib.Path
        The folder in which ranks of one host share memory.
    """
    with ExitStack() as stack:
        _join(config, launch, stack)
        everyone = Ranks(launch.rank, launch.size, timeout=config.timeout)
        found = everyone.gather((_this_host(shared_memory), machine.allowed))
        here = [rank for rank, (host, _) in enumerate(found) if host == found[launch.rank][0]]
        local_rank = here.index(launch.rank)
        masks = [found[rank][1] for rank in here]
        shares = _shares(config, machine, here, masks)
        share = shares[local_rank] if shares else None
        ranks = Ranks(
            launch.rank,
            launch.size,
            local_rank=local_rank,
            local_size=len(here),
            timeout=config.timeout,
            shares=tuple(each.cpus for each in shares),
            loader_cpus=share.loader_cpus if share else (),
            folder=_common_folder(everyone, shared_memory, stack) if len(here) == launch.size else None,
        )
        if share is not None:
            stack.enter_context(bound(share.cpus))
        mine = restricted(machine, share, len(here)) if share else _undivided(machine, masks)
        stack.callback(note_rank, note_rank(launch.rank))
        yield Seat(ranks, mine, machine)


def _join(config: Options, launch: Launch, stack: ExitStack) -> None:
    if not distributed.is_initialized():
        store = outside_store(launch, os.environ, config.timeout)
        group = process_group(
            config.process_group_backend, store, launch.rank, launch.size, config.timeout, local=False
        )
        stack.enter_context(group)
    elif distributed.get_world_size() != launch.size:
        given = f"this process is in a process group of {distributed.get_world_size()}"
        needed = f"{launch.launcher} has started {launch.size} processes"
        raise NanoError(problem(given, needed, "Call torch.distributed.destroy_process_group() before"))


def _this_host(shared_memory: Path) -> _Host:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return _Host(socket.gethostname(), boot, shared_memory.stat().st_dev if shared_memory.exists() else 0)


def _shares(config: Options, machine: Machine, here: list[int], masks: list[_Mask]) -> tuple[Share, ...]:
    """Divide the host among its ranks, or give nothing where the launcher has done so, or has too many of them."""
    if config.cpu_for_each_process is None:
        divided = any(each != machine.allowed for each in masks)
        if divided or len(here) > machine.num_threads or not hasattr(os, "sched_setaffinity"):
            return ()
    return shares_of(config, machine, here)


def _undivided(machine: Machine, masks: list[_Mask]) -> Machine:
    """Return the machine as one of the ranks with these masks may use it, where none of them is bound by us.

    A quota is common to all of them, and so are the cores where their masks are the same.
    """
    shared = machine.num_threads if all(each == machine.allowed for each in masks) else machine.quota
    return machine if shared is None else replace(machine, quota=shared / len(masks))


def _common_folder(everyone: Ranks, shared_memory: Path, stack: ExitStack) -> Path:
    folder = None
    if everyone.rank == 0:
        parent = shared_memory if os.access(shared_memory, os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix=f"nano_loop-{os.getpid()}-", dir=parent))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    found = everyone.broadcast(folder)
    assert found is not None
    return found
