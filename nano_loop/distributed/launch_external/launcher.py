"""Runs whose processes were started by torchrun, srun or MPI: they find each other and divide each host among them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from nano_loop.config.options import Options
from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.comm.process_group_channel import ProcessGroupChannel
from nano_loop.distributed.comm.rank_slot import RankSlot, shares_of
from nano_loop.distributed.comm.ranks import Ranks, by_host
from nano_loop.distributed.files.private_files import private_files, shards
from nano_loop.distributed.launch.failure import died
from nano_loop.distributed.launch.group import gradient_group, local_group, process_group, shared_channel
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.launch.shared_folder import folder_of_process, has_ended
from nano_loop.distributed.launch_external.environment import Launch, local_size
from nano_loop.distributed.launch_external.rendezvous import (
    BEGAN,
    common_folder,
    external_store,
    gather_at,
    gather_in_group,
    this_host,
)
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.integrations.rank_zero import note_rank

_Mask = tuple[int, ...]  # the CPUs that a rank may use


class External(Launcher):
    """The ranks of an external launch, which nano_loop does not start or end; the user's process group is kept."""

    def __init__(self, options: Options, launch: Launch) -> None:
        super().__init__(options)
        self.launch = launch

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        options, launch = self.options, self.launch
        if options.num_processes not in (None, "auto", launch.size):
            expected = f"{launch.launcher} has started {launch.size} processes"
            raise NanoConfigError(error_message(options.as_written["num_processes"], expected, "Omit it"))
        size = local_size(launch, os.environ)
        return Ranks(launch.rank, launch.size, local_rank=launch.rank % size, local_size=size)

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[RankSlot]:
        """See `Launcher.joined`."""
        launch, store = self.launch, None
        if not distributed.is_initialized():
            store = external_store(launch, os.environ, self.options.timeout)
        elif distributed.get_world_size() != launch.size:
            got = f"this process is in a process group of {distributed.get_world_size()}"
            expected = f"{launch.launcher} has started {launch.size} processes"
            raise NanoError(error_message(got, expected, "Call torch.distributed.destroy_process_group() before"))
        with join_run(store, self.options, machine, launch) as slot:
            yield slot


@contextmanager
def join_run(
    store: Store | None,
    options: Options,
    machine: Machine,
    launch: Launch,
    *,
    check: Callable[[], None] = lambda: None,
    address: str | None = None,
    threads: int | None = None,
    folder: Path | None = None,
) -> Iterator[RankSlot]:
    """Join the other processes of a launch, however started, and divide this host among its ranks. Collective.

    They meet in `store`, which no other run uses, or in the user's process group. Without `threads`, the ranks of a
    host divide its CPUs; with it, this process has so many compute threads and is not bound. A launcher that passes
    a `folder` of this process (see `common_folder`) watches the ranks and keeps their files private itself.
    """
    everyone = Ranks(launch.rank, launch.size, timeout=options.timeout, check=check)
    gather = gather_in_group(everyone) if store is None else gather_at(store, everyone)
    own = json.dumps([this_host(), machine.allowed, os.getpid()])
    hosts, cpus, processes = zip(*map(json.loads, gather(own)), strict=True)
    members = by_host(hosts)
    here = next(ranks for ranks in members if launch.rank in ranks)
    masks = [tuple(cpus[rank]) for rank in here]
    shares = _shares(options, machine, here, masks) if threads is None else ()
    share = shares[here.index(launch.rank)] if shares else None
    with ExitStack() as stack:
        common = stack.enter_context(common_folder(launch.rank, gather, here, folder))
        if folder is None and launch.rank:
            since = (common / BEGAN).stat().st_ctime_ns
            stack.enter_context(private_files(launch.rank, folder_of_process(os.getpid()), since, common))
        ranks = Ranks(
            launch.rank,
            launch.size,
            local_rank=here.index(launch.rank),
            local_size=len(here),
            check=check,
            timeout=options.timeout,
            shares=tuple(share.cpus for share in shares),
            loader_cpus=share.loader_cpus if share else (),
            folder=common if len(members) == 1 else None,
        )
        backend = options.process_group_backend
        if ranks.folder is not None:
            if folder is None:
                watch_each_other(ranks, processes)
            local = shared_channel(ranks, ranks.folder) if store is None else local_group(ranks, backend)
            stack.enter_context(local)
        else:
            if store is not None:
                group = PrefixStore("group", store)
                stack.enter_context(process_group(group, ranks, backend, address=address))
            stack.enter_context(gradient_group(ranks, address=address))
            ranks.channel = ProcessGroupChannel(ranks)
            ranks.context.after_averaging.append(lambda _: shards().move_latest())
        if share is not None:
            stack.enter_context(bound(share.cpus))
        part = restricted(machine, share, len(here)) if share else _undivided(machine, masks, threads)
        stack.callback(note_rank, note_rank(launch.rank))
        yield RankSlot(ranks, part, machine)
        if ranks.folder is None:
            shards().move()


def _shares(options: Options, machine: Machine, here: list[int], masks: list[_Mask]) -> tuple[Share, ...]:
    """Divide the host among its ranks; empty if the launcher has already done so, or has started too many of them."""
    if options.cpu_for_each_process is None:
        divided = any(mask != machine.allowed for mask in masks)
        if divided or len(here) > machine.num_threads or not hasattr(os, "sched_setaffinity"):
            return ()
    return shares_of(options, machine, here)


def _undivided(machine: Machine, masks: list[_Mask], threads: int | None) -> Machine:
    """Return the part of the machine for one of the ranks with these masks, which share a quota, and maybe cores."""
    if threads is not None:
        return replace(machine, quota=float(min(threads, machine.num_threads)))
    shared = machine.num_threads if all(mask == machine.allowed for mask in masks) else machine.quota
    return machine if shared is None else replace(machine, quota=shared / len(masks))


# # --- how ranks of one host detect that another rank's process has ended ---

_INTERVAL = 0.2  # seconds between checks of the others


def watch_each_other(ranks: Ranks, processes: Sequence[int]) -> None:
    """Make waits of a host's ranks raise a `NanoWorkerError` if another rank's process ended without leaving."""
    launcher_s, looked = ranks.check, time.monotonic()

    def check() -> None:
        nonlocal looked
        launcher_s()
        if time.monotonic() < looked + _INTERVAL:
            return
        looked = time.monotonic()
        for rank, process in enumerate(processes):
            # It may have left and ended since its process was checked.
            if has_ended(process) and not _has_left(ranks, rank):
                raise died(rank).as_error()

    ranks.check = check


def _has_left(ranks: Ranks, rank: int) -> bool:
    channel = ranks.channel if ranks.have_joined else None
    return isinstance(channel, SharedChannel) and channel.segment.has_left(rank)
