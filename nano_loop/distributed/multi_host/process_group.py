"""The transport over torch's process group: any backend, any number of hosts, several buckets under way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import distributed

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider, new_scratch, real, write_mean
from nano_loop.distributed.comm.packing import Batch, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError, error_message

_BUCKET = 25 << 20  # bytes: large enough for bandwidth, small enough that copying one overlaps with sending another
_UNDER_WAY = 4  # buckets that `average` has started and not finished: more would only take more memory
_FIRST_MESSAGE = 248  # bytes of a header that travel with its length, in one message


class ProcessGroupTransport:
    """Averages in flat buckets over a process group. See `Transport`.

    Elements of 16 bits, which gloo would sum in 16 bits, are sent to the ranks that sum them, and gathered again: the
    same traffic as an all-reduce.

    Parameters
    ----------
    ranks : Ranks
        Two or more, with a default process group between them.
    compression : torch.dtype, optional
        In which float32 and float64 tensors travel, such as ``torch.bfloat16``.
    bucket : int
        Bytes that travel as one.
    group : torch.distributed.ProcessGroup, optional
        Those of the ranks that average; by default, all.
    """

    def __init__(
        self, ranks: Ranks, *, compression: torch.dtype | None = None, bucket: int = _BUCKET, group: Any = None
    ) -> None:
        self._ranks, self._group = ranks, group
        self._size: int = ranks.size if group is None else group.size()
        self._bucket = bucket
        self._pack = lru_cache(maxsize=64)(partial(pack, capacity=bucket, compression=compression))
        self._unused: list[torch.Tensor] = []  # buffers of earlier buckets, so that their pages are faulted in once
        self._scratch = new_scratch()
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
        self._pack.cache_clear()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))

    def _start(self, batch: Batch, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]) -> _Bucket:
        memory = [self._take()]
        elements = self._elements(memory[0], batch)
        batch.places(elements).fill(tensors, flat)
        if is_summed_wider(batch.dtype):
            memory.append(self._take())
            work = distributed.all_to_all_single(
                self._elements(memory[1], batch), elements, group=self._group, async_op=True
            )
        else:
            work = distributed.all_reduce(real(elements[: batch.length]), group=self._group, async_op=True)
        return _Bucket(batch, memory, work)

    def _finish(self, bucket: _Bucket, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]) -> None:
        self._ranks.finish(bucket.work)
        elements = [self._elements(memory, bucket.batch) for memory in bucket.memory]
        if is_summed_wider(bucket.batch.dtype):
            self._average_slice(*elements)
        else:
            divide(real(elements[0][: bucket.batch.length]), self._size)
        bucket.batch.places(elements[-1]).empty(tensors, flat)
        self._unused += bucket.memory

    def _average_slice(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Average this rank's slice, received from all ranks, and gather all slices into `received`."""
        slices = received.chunk(self._size)
        mean = sent[: len(slices[0])]
        write_mean(mean, slices, self._scratch)
        self._ranks.finish(distributed.all_gather(list(slices), mean, self._group, async_op=True))

    def _take(self) -> torch.Tensor:
        # A batch may be filled to the last byte, and is then rounded up to equal slices.
        length = self._bucket + 2 * self._size
        return self._unused.pop() if self._unused else torch.empty(length, dtype=torch.uint8, device="cpu")

    def _elements(self, memory: torch.Tensor, batch: Batch) -> torch.Tensor:
        length = batch.length
        if is_summed_wider(batch.dtype):  # every rank sums a slice, and slices are of one length
            length = -(-length // self._size) * self._size
        return memory[: length * batch.dtype.itemsize].view(batch.dtype)

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(message) for _ in range(self._size)]
        self._ranks.finish(distributed.all_gather(received, message, self._group, async_op=True))
        return received


@dataclass(frozen=True)
class _Bucket:
    """A batch that is under way, the buffers that it takes, and what torch has been asked to do with them."""

    batch: Batch
    memory: list[torch.Tensor]
    work: Any


def _padded(data: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: len(data)] = data
    return padded
