"""The transport between several hosts: within each through shared memory, and between them by one rank each.

A network between hosts is tens of times slower than shared memory. With n ranks a host, an all-reduce over all ranks
carries what n ranks have over it, and this transport what one has. torch's DistributedDataParallel has nothing like it
on CPUs. Without shared memory, and with other backends than gloo, each rank counts as a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed
from typing_extensions import override

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider, new_scratch, real, write_mean
from nano_loop.distributed.comm.ranks import Hosts, Ranks, Reached
from nano_loop.distributed.shared_memory.shared_file import map_together
from nano_loop.distributed.shared_memory.shared_memory import SharedMemoryTransport
from nano_loop.distributed.shared_memory.shared_ring import BetweenHosts

_CHUNK = 4 << 20  # bytes that travel as one
_CHUNK_ALONE = 25 << 20  # the same where all ranks are on the network: each message waits for all of them
_SLOTS = 6  # one is filled, one summed, the others are between the hosts or on their way back
_FILE = "averaging-hosts"


class GroupMean:
    """Means over a process group.

    Elements of 16 bits, which gloo would sum in 16 bits, are sent to the ranks that sum them, and gathered again: the
    same traffic as an all-reduce.

    Parameters
    ----------
    ranks : Ranks
        All ranks of the run, for waits.
    group : torch.distributed.ProcessGroup, optional
        Those of the ranks that average; by default, all.
    """

    def __init__(self, ranks: Ranks, group: Any = None) -> None:
        self._ranks, self._group = ranks, group
        self.size: int = ranks.size if group is None else group.size()
        self._unused: list[torch.Tensor] = []  # what elements of 16 bits were received in, so that pages stay
        self._scratch = new_scratch()

    def average(self, elements: torch.Tensor) -> Iterator[Reached]:
        """Overwrite flat `elements` by their mean over the group; yield what has to be reached first.

        Several may be on their way, if all ranks advance them in the same order. Of elements of 16 bits, there are as
        many for each rank.
        """
        if not is_summed_wider(elements.dtype):
            total = real(elements)
            yield partial(self._ranks.is_finished, distributed.all_reduce(total, group=self._group, async_op=True))
            divide(total, self.size)
            return
        received = self._unused.pop() if self._unused else torch.empty(0, dtype=elements.dtype, device="cpu")
        if received.dtype is not elements.dtype or len(received) < len(elements):
            received = torch.empty_like(elements)
        exchanged = received[: len(elements)]
        sent = distributed.all_to_all_single(exchanged, elements, group=self._group, async_op=True)
        yield partial(self._ranks.is_finished, sent)
        slices = exchanged.chunk(self.size)
        mean = torch.empty_like(slices[0])
        write_mean(mean, slices, self._scratch)
        gathered = [*elements.chunk(self.size)]
        yield partial(self._ranks.is_finished, distributed.all_gather(gathered, mean, self._group, async_op=True))
        self._unused.append(received)

    def close(self) -> None:
        """Give back all memory, and the group.

        A group of gloo that is collected as garbage in a forked process, such as a loader's worker, ends that process:
        it joins threads that are not there.
        """
        self._unused.clear()
        self._group = None


class HostsTransport(SharedMemoryTransport):
    """Averages within each host, then between the hosts by their first ranks.

    Elements of 16 bits are summed in float32 on each host, rounded, and summed in float32 between the hosts.

    Parameters
    ----------
    ranks : Ranks
        All ranks, with a default process group between them. Collective.
    hosts : Hosts, optional
        Where they are; by default, each rank alone on its host.
    chunk : int, optional
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
        hosts: Hosts | None = None,
        *,
        chunk: int | None = None,
        slots: int = _SLOTS,
    ) -> None:
        chunk = chunk or (_CHUNK_ALONE if hosts is None else _CHUNK)
        if hosts is None:
            hosts = Hosts([(rank,) for rank in range(ranks.size)], ranks.rank, folder=None, leaders=None)
        here, count, path = hosts.here, len(hosts.members), hosts.folder
        local = ranks.group(here)
        self._mean = GroupMean(ranks, hosts.leaders) if local.rank == 0 else None
        average = None if self._mean is None else self._mean.average
        super().__init__(
            local,
            partial(map_together, ranks, None if path is None else path / _FILE, local.rank == 0),
            chunk=chunk,
            slots=slots,
            between=BetweenHosts(count, len(here) * count / ranks.size, average),
        )

    @override
    def close(self) -> None:
        super().close()
        if self._mean is not None:
            self._mean.close()
