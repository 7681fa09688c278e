"""The transport between several hosts: within each through shared memory, and between them by one rank each.

A network between hosts is tens of times slower than shared memory. With n ranks a host, an all-reduce over all ranks
carries what n ranks have over it, and this transport what one has. torch's DistributedDataParallel has nothing like it
on CPUs.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch

from nano_loop.distributed.comm.hosts import Hosts
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.multi_host.process_group import GroupMean, ProcessGroupTransport
from nano_loop.distributed.shared_memory.allocation import map_by_name
from nano_loop.distributed.shared_memory.shared_memory import SharedMemoryTransport, Stream
from nano_loop.distributed.shared_memory.shared_ring import BetweenHosts
from nano_loop.errors import NanoError

_CHUNK = 4 << 20  # bytes that travel as one
_SLOTS = 6  # one is filled, one summed, the others are between the hosts or on their way back
_FILE = "averaging-hosts"


class HostsTransport:
    """Averages within each host, then between the hosts by their first ranks. See `Transport`.

    Elements of 16 bits are summed in float32 on each host, rounded, and summed in float32 between the hosts.

    Parameters
    ----------
    ranks : Ranks
        All ranks, with a default process group between them. Collective.
    hosts : Hosts
        Where they are.
    compression : torch.dtype, optional
        In which float32 and float64 tensors travel, such as ``torch.bfloat16``.
    chunk : int
        Bytes that travel as one, a multiple of 128.
    slots : int
        Such chunks under way at a time, four or more.

    Raises
    ------
    NanoError
        On every rank, if a host has no room in its shared memory.
    """

    def __init__(
        self,
        ranks: Ranks,
        hosts: Hosts,
        *,
        compression: torch.dtype | None = None,
        chunk: int = _CHUNK,
        slots: int = _SLOTS,
    ) -> None:
        self._everyone = ProcessGroupTransport(ranks)
        here, count = hosts.here, len(hosts.members)
        is_first = ranks.rank == here[0]
        self._between = GroupMean(ranks, hosts.leaders) if is_first else None
        average = None if self._between is None else self._between.average
        between = BetweenHosts(count, len(here) * count / ranks.size, average)
        make = partial(SharedMemoryTransport, compression=compression, chunk=chunk, slots=slots, between=between)
        # Nothing waits for a rank of this host before all ranks know that there is room.
        local = Ranks(
            here.index(ranks.rank), len(here), check=lambda: ranks.check(), timeout=ranks.timeout, context=ranks.context
        )
        path = None if hosts.folder is None else hosts.folder / _FILE
        mapped: Callable[[int], mmap.mmap] = partial(mmap.mmap, -1) if path is None else partial(map_by_name, path)
        transport, reason = None, ""
        try:
            transport = make(local, mapped, names=[*here])
        except NanoError as error:
            reason = str(error)
        try:
            reasons = ranks.gather(reason)  # from here on all have mapped it
        finally:
            if path is not None and is_first:
                path.unlink(missing_ok=True)
        if transport is None or any(reasons):
            raise NanoError(next(filter(None, reasons)))
        self._here = transport

    def exchange(self, header: torch.Tensor) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        return self._everyone.exchange(header)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Transport.average`."""
        self._here.average(tensors)

    def stream(self, targets: Sequence[torch.Tensor]) -> Stream:
        """See `SharedMemoryTransport.stream`."""
        return self._here.stream(targets)

    def leave(self) -> None:
        """See `Transport.leave`."""
        self._here.leave()

    def close(self) -> None:
        """See `Transport.close`."""
        self._everyone.close()
        self._here.close()
        if self._between is not None:
            self._between.close()
