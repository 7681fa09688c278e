"""A run whose processes torchrun, srun or MPI has started: they find each other, and divide each host among them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from nano_loop.cpu import Machine, Share, bound, restricted
from nano_loop.distributed.hosts import Hosts, by_host
from nano_loop.distributed.launch.external.connecting import (
    ByBackend,
    Connecting,
    InGroupOfUser,
    common_folder,
    connected_on_one_host,
)
from nano_loop.distributed.launch.external.environment import Launch, local_size
from nano_loop.distributed.launch.external.meeting import GroupMeeting, Host, Meeting, Presence, StoreMeeting
from nano_loop.distributed.launch.external.store import external_store
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.launch.shared_folder import shared_memory_device
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of
from nano_loop.distributed.signed import SignedCodec, secret_of
from nano_loop.distributed.transport.process_group_channel import ProcessGroupChannel
from nano_loop.environment import SECRET
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.options import Options
from nano_loop.rank_zero import note_rank

_Mask = tuple[int, ...]  # the CPUs that a rank may use


@dataclass(frozen=True)
class Terms:
    """What a launcher gives a process besides its place.

    Attributes
    ----------
    check : callable
        See `Ranks`.
    address : str or None
        See `process_group`.
    secret : bytes or None
        By which values are signed between hosts. None: that in the environment.
    threads : int or None
        Compute threads of this process, which is not bound then. None: the ranks of a host divide it.
    watched : bool
        Whether rank 0 sees how the other processes end. By default, the ranks of a host watch each other.
    parent : Path or None
        See `common_folder`.
    """

    check: Callable[[], None] = lambda: None
    address: str | None = None
    secret: bytes | None = None
    threads: int | None = None
    watched: bool = False
    parent: Path | None = None


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
        everyone = Ranks(launch.rank, launch.size, timeout=self.options.timeout)
        if not distributed.is_initialized():
            store = external_store(launch, os.environ, self.options.timeout)
            with joined_at(store, self.options, machine, launch) as seat:
                yield seat
            return
        if distributed.get_world_size() != launch.size:
            given = f"this process is in a process group of {distributed.get_world_size()}"
            needed = f"{launch.launcher} has started {launch.size} processes"
            raise NanoError(problem(given, needed, "Call torch.distributed.destroy_process_group() before"))
        meeting = GroupMeeting(ProcessGroupChannel(everyone, SignedCodec(launch.rank, b"", None)))
        with _seated(self.options, machine, everyone, meeting, InGroupOfUser(), Terms()) as seat:
            yield seat


@contextmanager
def joined_at(
    store: Store,
    options: Options,
    machine: Machine,
    launch: Launch,
    terms: Terms | None = None,
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
    terms : Terms or None
        What the launcher gives besides; None: nothing.
    """
    terms = terms or Terms()
    everyone = Ranks(launch.rank, launch.size, timeout=options.timeout, check=terms.check)
    connecting = ByBackend(PrefixStore("group", store), options.process_group_backend, terms.address)
    with _seated(options, machine, everyone, StoreMeeting(store, everyone), connecting, terms) as seat:
        yield seat


@contextmanager
def _seated(
    options: Options,
    machine: Machine,
    everyone: Ranks,
    meeting: Meeting,
    connecting: Connecting,
    terms: Terms,
) -> Iterator[Seat]:
    """Find out who is on which host, connect all, and divide this host. Collective."""
    threads = terms.threads
    with ExitStack() as stack:
        secret = terms.secret or secret_of(os.environ)
        mine = Presence.here(_this_host(), machine.allowed, signs=secret is not None)
        texts = meeting.gather(mine.as_text())
        found = [Presence.from_text(text, rank) for rank, text in enumerate(texts)]
        here = [rank for rank, each in enumerate(found) if each.host == mine.host]
        masks = [found[rank].cpus for rank in here]
        local_rank = here.index(everyone.rank)
        shares = _shares(options, machine, here, masks) if threads is None else ()
        share = shares[local_rank] if shares else None
        on_one_host = len(here) == everyone.size
        members = by_host([each.host for each in found])
        shared = any(len(each) > 1 for each in members)
        folder = stack.enter_context(common_folder(everyone, meeting, here, terms.parent)) if shared else None
        ranks = Ranks(
            everyone.rank,
            everyone.size,
            local_rank=local_rank,
            local_size=len(here),
            check=everyone.check,
            timeout=everyone.timeout,
            shares=tuple(each.cpus for each in shares),
            loader_cpus=share.loader_cpus if share else (),
            folder=folder if on_one_host else None,
        )
        if ranks.folder is not None:
            local = connecting.on_one_host if terms.watched else partial(connected_on_one_host, connecting)
            stack.enter_context(local(ranks, ranks.folder))
        else:
            leaders = stack.enter_context(connecting.between_hosts(ranks, members))
            _refuse_different_secrets(found)
            if leaders is not None:
                ranks.hosts = Hosts(members, members.index(here), folder if len(here) > 1 else None, leaders)
            ranks.channel = ProcessGroupChannel(ranks, SignedCodec(ranks.rank, _run_of(found), secret))
        if share is not None:
            stack.enter_context(bound(share.cpus))
        part = restricted(machine, share, len(here)) if share else _undivided(machine, masks, threads)
        stack.callback(note_rank, note_rank(everyone.rank))
        yield Seat(ranks, part, machine)


def _this_host() -> Host:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return Host(socket.gethostname(), boot, shared_memory_device())


def _refuse_different_secrets(found: list[Presence]) -> None:
    """Raise on every rank if some have a secret and others have none."""
    without = [rank for rank, each in enumerate(found) if not each.signs]
    if without and len(without) < len(found):
        given = f"{SECRET} is not set for rank {', '.join(map(str, without))}"
        raise NanoError(problem(given, "all ranks have the same secret, or none has one", "Set it for every rank"))


def _run_of(found: list[Presence]) -> bytes:
    """Return what only this run has, as each rank's own nonce is in it."""
    return hashlib.sha256(json.dumps([each.nonce for each in found]).encode()).digest()


def _shares(options: Options, machine: Machine, here: list[int], masks: list[_Mask]) -> tuple[Share, ...]:
    """Divide the host among its ranks; nothing if the launcher has done so, or has started too many of them."""
    if options.cpu_for_each_process is None:
        divided = any(each != machine.allowed for each in masks)
        if divided or len(here) > machine.num_threads or not hasattr(os, "sched_setaffinity"):
            return ()
    return shares_of(options, machine, here)


def _undivided(machine: Machine, masks: list[_Mask], threads: int | None) -> Machine:
    """Return the machine as one of the ranks with these masks may use it, if nano_loop binds none of them.

    A quota is common to all of them, and so are the cores where their masks are the same.
    """
    if threads is not None:
        return replace(machine, quota=float(min(threads, machine.num_threads)))
    shared = machine.num_threads if all(each == machine.allowed for each in masks) else machine.quota
    return machine if shared is None else replace(machine, quota=shared / len(masks))
