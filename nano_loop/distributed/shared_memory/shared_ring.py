"""A ring of slots in shared memory, through which batches of tensors go round and come out as means.

Three things are under way at once: a rank copies the other ranks' slices of batch k into its slot, sums its own slice
of batch k - 1 over all ranks' slots, into its tensors and into the ring's result slot, and copies the other slices of
batch k - 2 out of that. Each slice is summed by one rank, in the order of ranks, so all ranks have the same bits. Its
own slice a rank neither copies in nor out: with two ranks that saves half of all copies. Numbers of 16 bits, which are
summed in another dtype, and complex ones are copied as a whole.

A batch is used by three counters of each rank, which count batches over the ring's life:

- *posted*: it is in the rank's slot, and may be summed;
- *reduced*: the rank has summed its slice, so results may be read, and the slot is free as far as this rank goes;
- *read*: the rank has copied it out, so the result slot is free as far as this rank goes.

An averaging starts at a multiple of the ring's size, so that a batch of a list always meets the same slots and its
views are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nano_loop.distributed.comm.averaging_math import new_scratch, real, write_mean
from nano_loop.distributed.comm.packing import Batch, Packing, Places
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.local_shard import SUMMED_IN_PLACE, LocalShard
from nano_loop.distributed.shared_memory.shared_segment import LINE, SharedSegment


class Ring:
    """The slots, and this rank's place in the ring.

    Parameters
    ----------
    ranks : Ranks
        Those who share the segment.
    segment : SharedSegment
        Where the counters are.
    memory : torch.Tensor
        `Ring.nbytes` of shared memory, uint8.
    counters : sequence of int
        The segment's counters that are for posted, reduced and read.
    chunk : int
        Bytes of a slot, a multiple of a cache line.
    slots : int
        Batches that the ring holds.
    """

    def __init__(
        self,
        ranks: Ranks,
        segment: SharedSegment,
        memory: torch.Tensor,
        *,
        counters: Sequence[int],
        chunk: int,
        slots: int,
    ) -> None:
        self._segment = segment
        self._rank, self._size, self._slots = ranks.rank, ranks.size, slots
        self._memory = memory.view(slots, ranks.size + 1, chunk)  # the last of a row is for the result
        self._posted, self._reduced, self._read = (segment.places(counter) for counter in counters)
        self._base = 0  # batches until now, and those that a list left out at its end
        self._scratch = new_scratch()

    @staticmethod
    def nbytes(size: int, chunk: int, slots: int) -> int:
        """Return the memory that a ring between `size` ranks needs."""
        return slots * (size + 1) * chunk

    def plan(self, packing: Packing) -> Plan:
        """Make the views that averaging a list needs; they hold for the ring's life."""
        length = -(-len(packing.batches) // self._slots) * self._slots
        counts = [*range(1, len(packing.batches)), length]  # the last batch counts for the slots that are left out
        stages = [self._stage(*arguments) for arguments in zip(packing.batches, range(length), counts, strict=False)]
        cut = {index for stage in stages for index in stage.cut}
        return Plan(replace(packing, split=tuple(sorted({*packing.split, *cut}))), stages, length)

    def average(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors`, for which `plan` was made, by their means. Collective."""
        flat = plan.packing.flat(tensors)
        stages = plan.stages
        for number in range(len(stages) + 2):
            if number < len(stages):
                self._post(stages[number], number, tensors, flat)
            if 0 <= number - 1 < len(stages):
                self._reduce(stages[number - 1], number - 1, tensors, flat)
            if 0 <= number - 2 < len(stages):
                self._copy_out(stages[number - 2], number - 2, tensors, flat)
        self._base += plan.length
        plan.packing.put_back(tensors, flat)

    def _post(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]) -> None:
        self._segment.wait(self._reduced, self._base + number + 1 - self._slots)
        stage.coming.fill(tensors, flat)
        self._segment.publish(self._posted[self._rank], self._base + stage.count)

    def _reduce(
        self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]
    ) -> None:
        self._segment.wait(self._posted, self._base + number + 1)
        self._segment.wait(self._read, self._base + number + 1 - self._slots)
        if stage.own is not None:
            stage.own.average(tensors, flat)
        elif len(stage.mean):
            write_mean(stage.mean, stage.parts, self._scratch)
        self._segment.publish(self._reduced[self._rank], self._base + stage.count)

    def _copy_out(
        self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]
    ) -> None:
        self._segment.wait(self._reduced, self._base + number + 1)
        stage.going.empty(tensors, flat)
        self._segment.publish(self._read[self._rank], self._base + stage.count)

    def _stage(self, batch: Batch, number: int, count: int) -> _Stage:
        row = self._memory[number % self._slots, :, : batch.nbytes].view(batch.dtype)
        # Slices end where cache lines do, so that no two ranks write to one line.
        length = -(-batch.length // self._size)
        length = -(-length // LINE) * LINE
        start, stop = (min(rank * length, batch.length) for rank in (self._rank, self._rank + 1))
        if batch.dtype not in SUMMED_IN_PLACE:
            *parts, mean = (real(elements[start:stop]) for elements in row)
            return _Stage(batch.places(row[self._rank]), batch.places(row[-1]), parts, mean, count)
        own = LocalShard(batch, start, stop, self._rank, [*row[:-1]], row[-1])
        others = [*batch.between(0, start), *batch.between(stop, batch.length)]
        cut = [piece.index for piece in (*others, *batch.between(start, stop)) if piece.bounds is not None]
        coming, going = Places(others, row[self._rank]), Places(others, row[-1])
        return _Stage(coming, going, [], row[-1][:0], count, own, cut)


@dataclass(frozen=True)
class _Stage:
    """The views of a batch: into this rank's slot, into the result slot, and of its slice in every slot.

    `count` is what the counters show, from the averaging's start on, when the batch is done. `own` sums the slice where
    the tensors lie; without it, `parts` are summed into `mean`. `cut` are the tensors of which the views hold parts.
    """

    coming: Places
    going: Places
    parts: list[torch.Tensor]
    mean: torch.Tensor
    count: int
    own: LocalShard | None = None
    cut: Sequence[int] = ()


@dataclass(frozen=True)
class Plan:
    """How a list of tensors goes through a ring."""

    packing: Packing
    stages: list[_Stage]
    length: int  # slots that it takes, a multiple of the ring's
