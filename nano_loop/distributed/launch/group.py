"""Connections between the ranks of a run: a channel and a process group, which exist as long as the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]
from torch import distributed
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from nano_loop.distributed.comm.ranks import Ranks, wait_until
from nano_loop.distributed.files.private_files import shards
from nano_loop.distributed.launch.shared_folder import refuse_foreign_folder
from nano_loop.distributed.shared_memory.deadlocks import Waits
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.distributed.shared_memory.shared_group import NAME, SharedGroups
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import forget_group_count

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


@contextmanager
def local_group(ranks: Ranks, backend: str | None) -> Iterator[None]:
    """Connect ranks of one host, which meet in their folder without a socket, and enable `torch.distributed`.

    `backend` is torch.distributed's name of the default process group's backend; None uses shared memory.
    """
    assert ranks.folder is not None
    with shared_channel(ranks, ranks.folder) as channel, ExitStack() as stack:
        store = stack.enter_context(_file_store(ranks, ranks.folder))
        if backend is None:
            stack.enter_context(SharedGroups(ranks, ranks.folder, channel))
            stack.enter_context(process_group(store, ranks, NAME))
        else:
            # A host's name may not resolve, and other hosts must not reach these connections.
            stack.enter_context(_through_interface_of(_LOOPBACK, forced=True))
            stack.enter_context(process_group(store, ranks, backend))
        yield


@contextmanager
def shared_channel(ranks: Ranks, folder: Path) -> Iterator[SharedChannel]:
    """Give `ranks` a channel through shared memory, and tell the others how this rank leaves it."""
    refuse_foreign_folder(folder)
    channel = SharedChannel(ranks, folder)
    returned = False
    try:
        ranks.channel, ranks.context.waits = channel, Waits(ranks.rank, folder)
        yield channel
        returned = True
    finally:
        ranks.channel = ranks.context.waits = None  # type: ignore[assignment]
        channel.leave(returned=returned)
        if returned and shards().waiting:
            with suppress(NanoError):  # another rank has failed
                wait_until(lambda: channel.segment.has_left(0), ranks.check)
                shards().move()
        channel.close()


@contextmanager
def process_group(store: Store, ranks: Ranks, backend: str | None, *, address: str | None = None) -> Iterator[None]:
    """Create torch's default process group of the ranks that meet at a store, and destroy it on exit.

    gloo uses the network interface of `address`, an address of this host, unless the user has chosen one by
    ``GLOO_SOCKET_IFNAME``. With None, it resolves the host's name.
    """
    timeout = timedelta(seconds=ranks.timeout)
    try:
        with _through_interface_of(address), ExitStack() as stack:
            # torch replaces it by a hook that prefixes every line with the rank.
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            distributed.init_process_group(
                backend or "gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout
            )
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()  # a process that exits with work in flight is aborted
        else:
            forget_group_count()  # otherwise the next group's name would differ from that on ranks that have not failed


@contextmanager
def gradient_group(ranks: Ranks, *, address: str | None = None) -> Iterator[None]:
    """Give the ranks' context another process group for gradients; for `address`, see `process_group`. Collective."""
    with _through_interface_of(address):
        ranks.context.gradient_group = distributed.new_group(timeout=timedelta(seconds=ranks.timeout))
    try:
        yield
    finally:
        group, ranks.context.gradient_group = ranks.context.gradient_group, None  # see `GroupTransport.close`
        if distributed.is_initialized():
            distributed.destroy_process_group(group)


@contextmanager
def _file_store(ranks: Ranks, folder: Path) -> Iterator[Store]:
    """Yield the store of ranks of one host, in their folder.

    torch aborts a rank whose store's file goes before the store. So each rank accesses it by a link that it deletes
    itself: torch does nothing for a store whose file is gone.
    """
    link = folder / f"store-{ranks.rank}"
    link.symlink_to("store")
    try:
        yield FileStore(str(link), ranks.size)
    finally:
        link.unlink(missing_ok=True)


def refuse_existing_group() -> None:
    """Raise if the process is already in a group: torch has one default group per process."""
    if distributed.is_available() and distributed.is_initialized():
        got = f"this process is already in a process group of {distributed.get_world_size()}"
        expected = "num_processes creates a process group, and torch has one default group"
        raise NanoError(error_message(got, expected, "Call torch.distributed.destroy_process_group() before"))


@contextmanager
def _through_interface_of(address: str | None, *, forced: bool = False) -> Iterator[None]:
    """Make gloo listen and connect at `address`, unless the user has chosen an interface and `forced` is False."""
    chosen = os.environ.pop(_INTERFACE, None) if forced else None
    name = None if _INTERFACE in os.environ else _interface_of(address)
    os.environ.update({_INTERFACE: name} if name else {})
    try:
        yield
    finally:
        if name:
            del os.environ[_INTERFACE]
        os.environ.update({_INTERFACE: chosen} if chosen is not None else {})


def _interface_of(address: str | None) -> str | None:
    for name, addresses in psutil.net_if_addrs().items() if address else ():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None
