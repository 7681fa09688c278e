"""The transport between ranks of one host: a ring of slots in shared memory, several times as fast as gloo's loopback.

Batches of tensors go round in it, and come out as means.

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

What a rank begins, it counts and marks, so that ranks which average other lists find out before they touch a tensor. A
rank can be one averaging ahead of another, and never two; so marks alternate between two places.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nano_loop.distributed.comm.averaging_math import divide_each, new_scratch, real, write_mean
from nano_loop.distributed.comm.packing import Batch, Packing, Places, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_segment import LINE, SharedSegment
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import foreach_add, foreach_copy

_BEGUN, *_OF_BATCHES = range(4)  # the counters
_MARKS = 1  # two words behind the counter of what has begun
# What is summed in itself. Numbers of 16 bits are summed in another dtype, and complex ones as pairs.
_SUMMED_IN_PLACE = (torch.float32, torch.float64)

_CHUNK = 1 << 20  # bytes that are copied, summed and copied back at once; the ring of them stays in a cache
_LEAST = 1 << 16  # such bytes where all gradients together are few
_SLOTS = 3  # one is copied in, one summed, one copied out
_MOST_PLANS = 64

_Flat = dict[int, torch.Tensor]  # see `Packing.flat`


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
        self._segment = SharedSegment(ranks, 1 + len(_OF_BATCHES), rows * chunk, mapped)
        self._names, self._rank, self._size = ranks.names, ranks.rank, ranks.size
        self._slots, self._chunk = slots, chunk
        self._memory = self._segment.memory.view(slots, ranks.size + 1, -1)  # the last of a row is for the result
        self._begun = self._segment.places(_BEGUN)
        self._posted, self._reduced, self._read = map(self._segment.places, _OF_BATCHES)
        self._averagings = 0
        self._base = 0  # batches until now, and those that a list left out at its end
        self._scratch = new_scratch()
        self._plans: dict[Signature, _Plan] = {}  # their views hold for the ring's life
        self._is_open = True

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, which is the same to the bit on every rank.

        The steps are in one order on all ranks, and none waits for a later one. Collective.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            On the CPU, of float32, float64, bfloat16, float16, complex64 or complex128, of any strides without
            overlap. Every rank gives the same shapes and dtypes in the same order; strides may differ.

        Raises
        ------
        NanoError
            Where a dtype is another, where a rank that this one waits for has failed, or is too late, and on every rank
            where they give different lists. Also after an averaging that was interrupted, and after `close`.
        """
        if not self._is_open:
            raise NanoError(error_message("averaging after the run", "the transport is closed", "Start another run"))
        plan = self._plan(signature(tensors))
        self._segment.begin()
        self._begin(plan.packing.mark)
        flat = plan.packing.flat(tensors)
        stages, last = plan.stages, len(plan.stages)
        for number in range(last + 2):
            for delay, step in enumerate((self._post, self._reduce, self._copy_out)):
                if 0 <= number - delay < last:
                    step(stages[number - delay], number - delay, tensors, flat)
        self._base += plan.length
        plan.packing.put_back(tensors, flat)
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
            packing = pack(signature, self._chunk)
            length = -(-len(packing.batches) // self._slots) * self._slots
            counts = [*range(1, len(packing.batches)), length]  # the last batch counts for the slots that are left out
            stages = [self._stage(*batch) for batch in zip(packing.batches, range(length), counts, strict=False)]
            cut = {index for stage in stages for index in stage.cut}
            whole = replace(packing, split=tuple(sorted({*packing.split, *cut})))
            self._plans[signature] = _Plan(whole, stages, length)
        return self._plans[signature]

    def _begin(self, mark: int) -> None:
        """Announce what this rank begins, which all others have to begin too; raise if one begins something else."""
        words = self._segment.words
        self._averagings += 1
        offset = _MARKS + self._averagings % 2
        words[self._begun[self._rank] + offset] = mark
        self._segment.publish(self._begun[self._rank], self._averagings)
        self._segment.wait(self._begun, self._averagings)
        others = [
            str(name) for name, place in zip(self._names, self._begun, strict=True) if words[place + offset] != mark
        ]
        if others:
            got = f"rank {self._names[self._rank]} averages other gradients than rank {', '.join(others)}"
            hint = "Make the loop do the same on every rank: the same model, the same parameters frozen, the same steps"
            raise NanoError(error_message(got, "all ranks must average the same gradients in the same order", hint))

    def _post(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor], flat: _Flat) -> None:
        self._segment.wait(self._reduced, self._base + number + 1 - self._slots)
        stage.coming.fill(tensors, flat)
        self._segment.publish(self._posted[self._rank], self._base + stage.count)

    def _reduce(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor], flat: _Flat) -> None:
        self._segment.wait(self._posted, self._base + number + 1)
        self._segment.wait(self._read, self._base + number + 1 - self._slots)
        if stage.own is not None:
            stage.own.average(tensors, flat)
        elif len(stage.mean):
            write_mean(stage.mean, stage.parts, self._scratch)
        self._segment.publish(self._reduced[self._rank], self._base + stage.count)

    def _copy_out(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor], flat: _Flat) -> None:
        self._segment.wait(self._reduced, self._base + number + 1)
        stage.going.empty(tensors, flat)
        self._segment.publish(self._read[self._rank], self._base + stage.count)

    def _stage(self, batch: Batch, number: int, count: int) -> _Stage:
        slot = self._memory[number % self._slots]
        row = slot[:, : batch.nbytes].view(batch.dtype)
        # Slices end where cache lines do, so that no two ranks write to one line.
        length = -(-batch.length // self._size)
        length = -(-length // LINE) * LINE
        start, stop = (min(rank * length, batch.length) for rank in (self._rank, self._rank + 1))
        if batch.dtype not in _SUMMED_IN_PLACE:
            *parts, mean = (real(elements[start:stop]) for elements in row)
            return _Stage(batch.places(row[self._rank]), batch.places(row[-1]), parts, mean, count)
        own = LocalShard(batch, start, stop, self._rank, [*row[:-1]], row[-1])
        others = [*batch.between(0, start), *batch.between(stop, batch.length)]
        cut = [piece.index for piece in (*others, *batch.between(start, stop)) if piece.bounds is not None]
        coming, going = Places(others, row[self._rank]), Places(others, row[-1])
        return _Stage(coming, going, [], row[-1][:0], count, own, cut)


class LocalShard:
    """Sums one slice of a batch over the ranks, in their order.

    Parameters
    ----------
    batch : Batch
        The batch, of a dtype of `_SUMMED_IN_PLACE`.
    start, stop : int
        Which of its elements are summed.
    rank : int
        This process's.
    slots : sequence of torch.Tensor
        Where the ranks' batches are in shared memory, by rank; this rank's own is not read.
    result : torch.Tensor
        Where the means go for the other ranks, of the batch's length.
    """

    def __init__(
        self, batch: Batch, start: int, stop: int, rank: int, slots: Sequence[torch.Tensor], result: torch.Tensor
    ) -> None:
        pieces = batch.between(start, stop)
        self._count = len(slots)
        self._result = Places(pieces, result)
        self._lower = [slot[start:stop] for slot in slots[:rank]]
        self._sum_of_lower = result[start:stop]
        self._of_lower = Places(pieces, slots[0] if rank == 1 else result)
        self._higher = [Places(pieces, slot) for slot in slots[rank + 1 :]]

    def average(self, tensors: Sequence[torch.Tensor], flat: dict[int, torch.Tensor]) -> None:
        """Overwrite this rank's elements, and those of the result, by the means over all ranks."""
        own_elements = self._result.elements(tensors, flat)
        if len(self._lower) > 1:
            torch.add(*self._lower[:2], out=self._sum_of_lower)
            for lower in self._lower[2:]:
                self._sum_of_lower.add_(lower)
        if self._lower:
            foreach_add(own_elements, self._of_lower.views)
        for places in self._higher:
            foreach_add(own_elements, places.views)
        divide_each(own_elements, self._count)
        foreach_copy(self._result.views, own_elements)


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
class _Plan:
    """How a list of tensors goes through a ring."""

    packing: Packing
    stages: list[_Stage]
    length: int  # slots that it takes, a multiple of the ring's


def chunk_for(nbytes: int) -> int:
    """Return the chunk for gradients of so many bytes together: memory that nobody uses takes time to make.

    For a model of some thousand parameters, the memory for the largest chunk took 20 ms of each run.
    """
    return min(max(1 << max(nbytes - 1, 0).bit_length(), _LEAST), _CHUNK)
