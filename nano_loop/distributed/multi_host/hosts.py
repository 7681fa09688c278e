"""The transport between several hosts: within each through shared memory, and between them by one rank each.

A network between hosts is tens of times slower than shared memory. With n ranks a host, an all-reduce over all ranks
carries what n ranks have over it, and this transport what one has. torch's DistributedDataParallel has nothing like it
on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial

import torch

from nano_loop.distributed.comm.hosts import Hosts
from nano_loop.distributed.comm.packing import pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.multi_host.process_group import ProcessGroupTransport
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.distributed.shared_memory.shared_memory import SharedMemoryTransport
from nano_loop.errors import NanoError
from nano_loop.patching.torch_private import foreach_multiply

_BUCKET = 4 << 20  # bytes that travel as one


class HostsTransport:
    """Averages within each host, then between the hosts by their first ranks, which tell the others. See `Transport`.

    Elements of 16 bits are summed in float32 on each host, rounded, and summed in float32 between the hosts.

    Parameters
    ----------
    ranks : Ranks
        All ranks, with a default process group between them. Collective.
    hosts : Hosts
        Where they are.
    compression : torch.dtype, optional
        In which float32 and float64 tensors travel, such as ``torch.bfloat16``.
    bucket : int
        Bytes that travel as one, a multiple of 128.

    Raises
    ------
    NanoError
        On every rank, if a host has no room in its shared memory.
    """

    def __init__(
        self, ranks: Ranks, hosts: Hosts, *, compression: torch.dtype | None = None, bucket: int = _BUCKET
    ) -> None:
        self._everyone = ProcessGroupTransport(ranks)

        def agree(reason: str) -> None:
            reasons = [rank_reason for rank_reason in ranks.gather(reason) if rank_reason]
            if reasons:
                raise NanoError(reasons[0])

        # Twice, since a rank that fails waits for no one: when the channel of each host is mapped, and its transport.
        local, channel = _channel_of(ranks, hosts, agree)
        reason = ""
        self._here: _Host | None = None
        try:
            self._here = None if channel is None else _Host(local, channel, hosts, compression, bucket)
        except NanoError as error:
            reason = str(error)
        agree(reason)
        # A host counts by its ranks.
        self._factor = len(hosts.here) * len(hosts.members) / ranks.size
        is_first = ranks.rank == hosts.here[0]
        between = partial(ProcessGroupTransport, ranks, compression=compression, bucket=bucket, group=hosts.leaders)
        self._between = between() if is_first else None

    def exchange(self, header: torch.Tensor) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        return self._everyone.exchange(header)

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Transport.average`."""
        if self._here is not None:
            self._here.transport.average(tensors)
        if self._between is not None:
            if self._factor != 1:
                foreach_multiply([*tensors], self._factor)
            self._between.average(tensors)
        if self._here is not None:
            self._here.take_from_first(tensors)

    def leave(self) -> None:
        """See `Transport.leave`."""
        if self._here is not None:
            self._here.leave()

    def close(self) -> None:
        """See `Transport.close`."""
        self._everyone.close()
        if self._between is not None:
            self._between.close()
        if self._here is not None:
            self._here.close()


class _Host:
    """What the ranks of one host share."""

    def __init__(
        self, local: Ranks, channel: SharedChannel, hosts: Hosts, compression: torch.dtype | None, bucket: int
    ) -> None:
        assert hosts.folder is not None
        names = [*hosts.here]
        self._local, self._channel = local, channel
        with ExitStack() as stack:
            stack.callback(channel.close)
            self.transport = SharedMemoryTransport(local, hosts.folder, compression=compression, names=names)
            stack.pop_all()
        self._pack = lru_cache(maxsize=64)(partial(pack, capacity=bucket))

    def take_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors by those of the host's first rank. Collective on the host."""
        packing = self._pack(signature(tensors))
        flat = packing.flat(tensors)
        is_first = self._local.rank == 0
        for batch in packing.batches:
            elements = torch.empty(batch.length, dtype=batch.dtype, device="cpu")
            places = batch.places(elements)
            if is_first:
                places.fill(tensors, flat)
            self._channel.broadcast_tensor(elements, 0)
            if not is_first:
                places.empty(tensors, flat)
        if not is_first:
            packing.put_back(tensors, flat)

    def leave(self) -> None:
        """Announce that this rank averages no more."""
        self.transport.leave()
        self._channel.leave(returned=True)

    def close(self) -> None:
        """Give back all memory."""
        self.transport.close()
        self._channel.close()
        self._pack.cache_clear()


def _channel_of(ranks: Ranks, hosts: Hosts, agree: Callable[[str], None]) -> tuple[Ranks, SharedChannel | None]:
    """Return the ranks of this host, and the channel between them; None where it has one rank. Collective."""
    here, context = hosts.here, ranks.context
    local = Ranks(
        here.index(ranks.rank), len(here), check=lambda: ranks.check(), timeout=ranks.timeout, context=context
    )
    if hosts.folder is None:
        agree("")
        return local, None
    channel = SharedChannel(local, hosts.folder, "averaging-hosts", names=[*here], agree=agree)
    local.channel = channel
    return local, channel
