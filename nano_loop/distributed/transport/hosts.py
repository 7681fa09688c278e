"""The transport between several hosts: within each through shared memory, and between them by one rank each.

A network between hosts is tens of times slower than shared memory. With n ranks a host, an all-reduce over all ranks
carries what n ranks have over it, and this transport what one has. torch's DistributedDataParallel has nothing like it
on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from nano_loop.distributed.hosts import Hosts
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.transport.between_hosts import BetweenHosts
from nano_loop.distributed.transport.host_ring import HostRing
from nano_loop.distributed.transport.means import is_summed_wider
from nano_loop.distributed.transport.packing import Batch, pack, signature
from nano_loop.distributed.transport.process_group import ProcessGroupTransport
from nano_loop.distributed.transport.shared_segment import LINE
from nano_loop.distributed.transport.sweep import Sweep
from nano_loop.errors import NanoError, problem

_CHUNK = 4 << 20  # bytes that travel as one
_SLOTS = 6  # one is filled, one summed, the others are between the hosts or on their way back


class HostsTransport:
    """Averages within each host, and then between the hosts. See `Transport`.

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
        self._pack = lru_cache(maxsize=64)(partial(pack, capacity=chunk, compression=compression))
        sizes = [len(each) for each in hosts.members]
        count, equal = len(sizes), len({*sizes}) == 1
        # A host counts by its ranks. A power of two divides exactly, and beforehand all ranks of a host do it.
        exact = equal and math.frexp(count)[0] == 0.5
        self._factor = 1.0 if equal else len(hosts.here) * count / ranks.size
        self._early = 1 / count if exact else 1.0
        self._slots, self._base, self._closed = slots, 0, False
        room = -(-(chunk + 2 * count) // LINE) * LINE  # slices of 16-bit numbers are rounded up
        self._ring = _made_everywhere(ranks, hosts, slots, room)
        first = self._ring.is_first
        self._between = BetweenHosts(ranks, hosts.leaders, divides=not exact) if first else None

    def exchange(self, header: torch.Tensor) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        return self._everyone.exchange(header)

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Transport.average`."""
        if self._closed:
            raise NanoError(problem("averaging after the run", "the transport is closed", "Start another run"))
        sweep = self.sweep(tensors)
        for index, tensor in enumerate(tensors):
            sweep.arrived(index, tensor)
        sweep.finish()

    def sweep(self, targets: Sequence[torch.Tensor]) -> Sweep:
        """Return the sweep of a list whose tensors are still to arrive, like `targets`, where their means go.

        It has to be finished before the next averaging. Collective.
        """
        packing = self._pack(signature(targets))
        base, self._base = self._base, self._base + len(packing.batches)
        between, factor, slots = self._between, self._factor_of, self._slots
        return Sweep(packing, self._ring, between, factor, base=base, slots=slots, targets=targets)

    def leave(self) -> None:
        """See `Transport.leave`."""
        self._ring.leave()

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self._ring.close()
        self._everyone.close()
        self._pack.cache_clear()

    def _factor_of(self, batch: Batch) -> float:
        return self._factor if is_summed_wider(batch.dtype) else self._factor * self._early


def _made_everywhere(ranks: Ranks, hosts: Hosts, slots: int, room: int) -> HostRing:
    """Make the ring of this host. Collective over all ranks, which find out where one of them cannot."""
    made, reason = None, ""
    try:
        made = HostRing(ranks, hosts.here, hosts.folder, slots, room)
    except NanoError as error:
        reason = str(error)
    reasons = ranks.gather(reason)
    if hosts.folder is not None and ranks.rank == hosts.here[0]:
        HostRing.forget(hosts.folder)  # from here on all have mapped it
    if made is None or any(reasons):
        raise NanoError(next(filter(None, reasons)))
    return made
