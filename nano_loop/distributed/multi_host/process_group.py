"""The transport over torch's process group: any backend, any number of hosts, several buckets under way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import distributed

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider, new_scratch, real, write_mean
from nano_loop.distributed.comm.packing import Batch, Places, pack, signature
from nano_loop.distributed.comm.ranks import Ranks, Reached
from nano_loop.errors import NanoError, error_message

_BUCKET = 25 << 20  # bytes: large enough for bandwidth, small enough that copying one overlaps with sending another
_UNDER_WAY = 4  # buckets that `average` has started and not finished: more would only take more memory
_FIRST_MESSAGE = 248  # bytes of a header that travel with its length, in one message


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
        exchanged, group = received[: len(elements)], self._group
        yield partial(
            self._ranks.is_finished, distributed.all_to_all_single(exchanged, elements, group=group, async_op=True)
        )
        slices = exchanged.chunk(self.size)
        mean = torch.empty_like(slices[0])
        write_mean(mean, slices, self._scratch)
        gathered = [*elements.chunk(self.size)]
        yield partial(self._ranks.is_finished, distributed.all_gather(gathered, mean, group, async_op=True))
        self._unused.append(received)

    def close(self) -> None:
        """Give back all memory."""
        self._unused.clear()


class ProcessGroupTransport:
    """Averages in flat buckets over a process group. See `Transport`.

    Parameters
    ----------
    ranks : Ranks
        Two or more, with a default process group between them.
    compression : torch.dtype, optional
        In which float32 and float64 tensors travel, such as ``torch.bfloat16``.
    bucket : int
        Bytes that travel as one.
    """

    def __init__(self, ranks: Ranks, *, compression: torch.dtype | None = None, bucket: int = _BUCKET) -> None:
        self._ranks = ranks
        self._bucket = bucket
        self._pack = lru_cache(maxsize=64)(partial(pack, capacity=bucket, compression=compression))
        self._unused: list[torch.Tensor] = []  # buffers of earlier buckets, so that their pages are faulted in once
        self._mean = GroupMean(ranks)
        self._closed = False

    def exchange(self, header: torch.Tensor) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        self._refuse_closed()
        length = torch.tensor([header.numel()], dtype=torch.int64).view(torch.uint8)
        firsts = self._gather(torch.cat([length, _padded(header[:_FIRST_MESSAGE], _FIRST_MESSAGE)]))
        lengths = [int(first[:8].view(torch.int64)) for first in firsts]
        wholes, longest = [first[8:] for first in firsts], max(lengths) - _FIRST_MESSAGE
        if longest > 0:
            rests = self._gather(_padded(header[_FIRST_MESSAGE:], longest))
            wholes = [torch.cat(pair) for pair in zip(wholes, rests, strict=True)]
        return [whole[:length] for whole, length in zip(wholes, lengths, strict=True)]

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Transport.average`."""
        self._refuse_closed()
        packing = self._pack(signature(tensors))
        flat = packing.flat(tensors)
        buckets: deque[_Bucket] = deque()
        for batch in packing.batches:
            if len(buckets) == _UNDER_WAY:
                self._finish(buckets.popleft(), tensors, flat)
            buckets.append(self._start(batch, tensors, flat))
        for bucket in buckets:
            self._finish(bucket, tensors, flat)
        packing.put_back(tensors, flat)

    def leave(self) -> None:
        """See `Transport.leave`. A process group cannot announce it; `Ranks.check` finds out."""

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self._unused.clear()
        self._mean.close()
        self._pack.cache_clear()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))

    def _start(self, batch: Batch, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]) -> _Bucket:
        length = batch.padded(self._ranks.size)
        # A batch may be filled to the last byte, and is then rounded up to equal slices.
        nbytes = self._bucket + 2 * self._ranks.size
        memory = self._unused.pop() if self._unused else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        elements = memory[: length * batch.dtype.itemsize].view(batch.dtype)
        places = batch.places(elements)
        places.fill(tensors, flat)
        rest = self._mean.average(elements)
        return _Bucket(places, memory, chain([next(rest)], rest))

    def _finish(self, bucket: _Bucket, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]) -> None:
        for reached in bucket.rest:
            reached(True)
        bucket.places.empty(tensors, flat)
        self._unused.append(bucket.memory)

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(message) for _ in range(self._ranks.size)]
        self._ranks.finish(distributed.all_gather(received, message, async_op=True))
        return received


class _Bucket(NamedTuple):
    """A batch that is under way: where its elements are in its memory, and what is left to do."""

    places: Places
    memory: torch.Tensor
    rest: Iterator[Reached]


def _padded(data: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: len(data)] = data
    return padded
