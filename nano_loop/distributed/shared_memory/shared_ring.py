"""The transport between ranks of one host: a ring of slots in shared memory, several times as fast as gloo's loopback.

Batches of tensors go round in it, and come out as means.

Three things are under way at once: a rank copies the other ranks' slices of batch k into its slot, sums its own slice
of batch k - 1 over all ranks' slots, into its tensors and into the ring's result slot, and copies the other slices of
batch k - 2 out of that. Each slice is summed by one rank, so all ranks have the same bits. Its own slice goes no other
way than into its cache and back: with two ranks that saves half of all copies.

A batch is used by three counters of each rank, which count batches over the ring's life:

- *posted*: it is in the rank's slot, and may be summed;
- *reduced*: the rank has summed its slice, so results may be read, and the slot is free as far as this rank goes;
- *read*: the rank has copied it out, so the result slot is free as far as this rank goes.

An averaging starts at a multiple of the ring's size, so that a batch of a list always meets the same slots and its
views are made once.

Whether all ranks average the same list is for who calls: the ranks compare fingerprints before.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider
from nano_loop.distributed.comm.packing import Batch, Places, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_segment import LINE, SharedSegment
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import foreach_copy

_COUNTERS = range(3)

_CHUNK = 1 << 20  # bytes that are copied, summed and copied back at once; the ring of them stays in a cache
_LEAST = 1 << 16  # such bytes where all gradients together are few
_SLOTS = 3  # one is copied in, one summed, one copied out
_MOST_PLANS = 64


class SharedMemoryTransport:
    """Averages through a ring of slots in a file that all ranks map.

    Parameters
    ----------
    ranks : Ranks
        Two or more, all on this host. Collective.
    mapped : callable
        See `SharedSegment`, such as `map_together` with a folder of a file system in memory.
    chunk : int
        Bytes that are averaged at once, a multiple of 128.
    slots : int
        Such chunks under way at a time, two or more.

    Raises
    ------
    NanoError
        What `mapped` raises, if there is no room.
    """

    def __init__(
        self, ranks: Ranks, mapped: Callable[[int], mmap.mmap], *, chunk: int = _CHUNK, slots: int = _SLOTS
    ) -> None:
        rows = slots * (ranks.size + 1)
        self._segment = SharedSegment(ranks, len(_COUNTERS), rows * chunk, mapped)
        self._rank, self._size = ranks.rank, ranks.size
        self._slots, self._chunk = slots, chunk
        self._memory = self._segment.memory.view(slots, ranks.size + 1, -1)  # the last of a row is for the result
        self._posted, self._reduced, self._read = map(self._segment.places, _COUNTERS)
        self._base = 0  # batches until now, and those that a list left out at its end
        self._plans: dict[Signature, _Plan] = {}  # their views hold for the ring's life
        self._is_open = True

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, which is the same to the bit on every rank.

        The steps are in one order on all ranks, and none waits for a later one. Collective.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            Contiguous, on the CPU, of float32, float64, bfloat16 or float16. Every rank gives the same shapes and
            dtypes in the same order.

        Raises
        ------
        NanoError
            Where a dtype is another, and where a rank that this one waits for has failed, or is too late. Also after an
            averaging that was interrupted, and after `close`.
        """
        if not self._is_open:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))
        plan = self._plan(signature(tensors))
        self._segment.begin()
        stages, last = plan.stages, len(plan.stages)
        for number in range(last + 2):
            for delay, step in enumerate((self._post, self._reduce, self._copy_out)):
                if 0 <= number - delay < last:
                    step(stages[number - delay], number - delay, tensors)
        self._base += plan.length
        self._segment.end()

    def leave(self) -> None:
        """Announce that this rank averages no more, so that a rank which waits for it raises at once."""
        self._segment.leave()

    def close(self) -> None:
        """Give back all memory. A closed transport raises on use."""
        if self._is_open:
            self._is_open, self._plans = False, {}
            self._memory = self._memory.new_empty(0)
            self._segment.close()

    def _plan(self, signature: Signature) -> _Plan:
        """Return the views that averaging a list needs."""
        if signature not in self._plans:
            if len(self._plans) == _MOST_PLANS:
                self._plans.clear()
            batches = pack(signature, self._chunk)
            length = -(-len(batches) // self._slots) * self._slots
            counts = [*range(1, len(batches)), length]  # the last batch counts for the slots that are left out
            stages = [self._stage(*batch) for batch in zip(batches, range(length), counts, strict=False)]
            self._plans[signature] = _Plan(stages, length)
        return self._plans[signature]

    def _post(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self._segment.wait(self._reduced, self._base + number + 1 - self._slots)
        stage.coming.fill(tensors)
        self._segment.publish(self._posted[self._rank], self._base + stage.count)

    def _reduce(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self._segment.wait(self._posted, self._base + number + 1)
        self._segment.wait(self._read, self._base + number + 1 - self._slots)
        stage.own.average(tensors)
        self._segment.publish(self._reduced[self._rank], self._base + stage.count)

    def _copy_out(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self._segment.wait(self._reduced, self._base + number + 1)
        stage.going.empty(tensors)
        self._segment.publish(self._read[self._rank], self._base + stage.count)

    def _stage(self, batch: Batch, number: int, count: int) -> _Stage:
        slot = self._memory[number % self._slots]
        row = slot[:, : batch.nbytes].view(batch.dtype)
        # Slices end where cache lines do, so that no two ranks write to one line.
        length = -(-batch.length // self._size)
        length = -(-length // LINE) * LINE
        start, stop = (min(rank * length, batch.length) for rank in (self._rank, self._rank + 1))
        own = LocalShard(batch, start, stop, self._rank, row)
        others = [*batch.between(0, start), *batch.between(stop, batch.length)]
        return _Stage(Places(others, row[self._rank]), Places(others, row[-1]), own, count)


class LocalShard:
    """Sums one slice of a batch over the ranks, in one pass over all of them.

    Parameters
    ----------
    batch : Batch
        The batch.
    start, stop : int
        Which of its elements are summed.
    rank : int
        This process's.
    rows : torch.Tensor
        Shared memory of the batch's dtype and length: a row for the elements of each rank, and one for the means.
    """

    def __init__(self, batch: Batch, start: int, stop: int, rank: int, rows: torch.Tensor) -> None:
        pieces = batch.between(start, stop)
        self._own = Places(pieces, rows[rank])
        self._result = Places(pieces, rows[-1])
        self._parts, self._mean = rows[:-1, start:stop], rows[-1, start:stop]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite this rank's elements, and those of the result, by the means over all ranks."""
        elements = self._own.elements(tensors)
        if not elements:
            return
        foreach_copy(self._own.views, elements)  # no other rank reads them there
        is_wide = is_summed_wider(self._mean.dtype)
        total = self._parts.sum(0, dtype=torch.float32) if is_wide else torch.sum(self._parts, 0, out=self._mean)
        divide(total, len(self._parts))
        if is_wide:
            self._mean.copy_(total)
        foreach_copy(elements, self._result.views)


@dataclass(frozen=True)
class _Stage:
    """The views of a batch: into this rank's slot, into the result slot, and of its slice in every slot.

    `count` is what the counters show, from the averaging's start on, when the batch is done.
    """

    coming: Places
    going: Places
    own: LocalShard
    count: int


@dataclass(frozen=True)
class _Plan:
    """How a list of tensors goes through a ring."""

    stages: list[_Stage]
    length: int  # slots that it takes, a multiple of the ring's


def chunk_for(nbytes: int) -> int:
    """Return the chunk for gradients of so many bytes together: memory that nobody uses takes time to make.

    For a model of some thousand parameters, the memory for the largest chunk took 20 ms of each run.
    """
    return min(max(1 << max(nbytes - 1, 0).bit_length(), _LEAST), _CHUNK)
