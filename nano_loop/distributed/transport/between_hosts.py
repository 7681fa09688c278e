"""Makes the results of all hosts their mean: what the first rank of each host does with the others', by gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.transport.means import divide, is_summed_wider, new_scratch, real, write_mean
from nano_loop.distributed.transport.packing import Batch


class BetweenHosts:
    """The exchanges between the first ranks of all hosts.

    Parameters
    ----------
    ranks : Ranks
        All ranks of the run, for waits.
    group : torch.distributed.ProcessGroup
        The first ranks of the hosts.
    divides : bool
        Whether a sum has to be divided by the number of hosts.
    """

    def __init__(self, ranks: Ranks, group: Any, *, divides: bool) -> None:
        self._ranks, self._group, self._divides = ranks, group, divides
        self._size: int = group.size()
        self._received: list[torch.Tensor] = []
        self._scratch = new_scratch()

    def nbytes(self, batch: Batch) -> int:
        """Return the bytes of a result: elements of 16 bits go in equal slices to the ranks that sum them."""
        wide = is_summed_wider(batch.dtype)
        length = -(-batch.length // self._size) * self._size if wide else batch.length
        return length * batch.dtype.itemsize

    def start(self, batch: Batch, result: torch.Tensor) -> UnderWay:
        """Begin with a result of `nbytes`, as bytes, which is the mean over all hosts after `finish`."""
        elements = result.view(batch.dtype)
        if not is_summed_wider(batch.dtype):
            return UnderWay(elements, None, distributed.all_reduce(real(elements), group=self._group, async_op=True))
        received = self._received.pop() if self._received else torch.empty(0, dtype=torch.uint8)
        received = received if len(received) >= len(result) else torch.empty_like(result)
        slices = received[: len(result)].view(batch.dtype)
        work = distributed.all_to_all_single(slices, elements, group=self._group, async_op=True)
        return UnderWay(elements, slices, work)

    def is_finished(self, under_way: UnderWay) -> bool:
        """Return whether `finish` would not wait."""
        return under_way.received is None and bool(under_way.work.is_completed())

    def finish(self, under_way: UnderWay) -> None:
        """Wait for what `start` has begun."""
        self._ranks.finish(under_way.work)
        elements, received = under_way.elements, under_way.received
        if received is None:
            if self._divides:
                divide(real(elements), self._size)
            return
        slices = received.chunk(self._size)
        mean = torch.empty_like(slices[0])
        write_mean(mean, slices, self._scratch)
        gathered = [*elements.chunk(self._size)]
        self._ranks.finish(distributed.all_gather(gathered, mean, group=self._group, async_op=True))
        self._received.append(received.view(torch.uint8))


class UnderWay:
    """One exchange: the result, what other hosts have sent of it, and what torch has been asked to do."""

    def __init__(self, elements: torch.Tensor, received: torch.Tensor | None, work: Any) -> None:
        self.elements, self.received, self.work = elements, received, work
