"""The process group of a run: made when it begins, destroyed when it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import psutil  # type: ignore[import-untyped,unused-ignore]
from torch import distributed
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from nano_loop.distributed.launch.quiet_gloo import without_greeting
from nano_loop.distributed.ranks import Ranks
from nano_loop.errors import NanoError, problem

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


@contextmanager
def process_group(store: Store, ranks: Ranks, backend: str | None, *, address: str | None = None) -> Iterator[None]:
    """Make torch's default process group, and destroy it on leaving.

    Parameters
    ----------
    store : torch.Store
        Where the ranks meet.
    ranks : Ranks
        Which of them this is, and how many seconds a collective may take.
    backend : str or None
        torch.distributed's name; None means gloo.
    address : str or None
        An address of this host: gloo connects through its network interface, unless the user has chosen one by
        ``GLOO_SOCKET_IFNAME``. None leaves the choice to gloo, which resolves the host's name.
    """
    timeout = timedelta(seconds=ranks.timeout)
    with _through_interface_of(address), _same_excepthook(), without_greeting():
        distributed.init_process_group(
            backend or "gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout
        )
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()  # a process that leaves with work in flight is aborted


def local_group(ranks: Ranks, backend: str | None) -> AbstractContextManager[None]:
    """Return a context with a process group between ranks of one host, which meet in their folder."""
    assert ranks.folder is not None
    # A host's name need not resolve, so they meet on the loopback interface.
    return process_group(FileStore(str(ranks.folder / "store"), ranks.size), ranks, backend, address=_LOOPBACK)


def refuse_existing_group() -> None:
    """Raise if the process is in a group already: torch has one default group a process."""
    if distributed.is_available() and distributed.is_initialized():
        given = f"this process is in a process group of {distributed.get_world_size()} already"
        needed = "num_processes makes a process group, and torch has one default group"
        raise NanoError(problem(given, needed, "Call torch.distributed.destroy_process_group() before"))


@contextmanager
def _through_interface_of(address: str | None) -> Iterator[None]:
    name = _interface_of(address)
    if _INTERFACE in os.environ or name is None:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _interface_of(address: str | None) -> str | None:
    for name, addresses in psutil.net_if_addrs().items() if address else ():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


@contextmanager
def _same_excepthook() -> Iterator[None]:
    """Keep the hook that shows exceptions: torch puts one in its place that marks every line with the rank."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
