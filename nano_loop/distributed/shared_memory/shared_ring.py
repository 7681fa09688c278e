"""The transport between ranks of one host: a ring of slots in shared memory, several times as fast as gloo's loopback.

Batches of tensors enter it and are returned as means.

Three operations overlap: a rank copies the other ranks' slices of batch k into its slot, sums its own slice of batch k
- 1 over all ranks' slots into its tensors and the ring's result slot, and copies the other slices of batch k - 2 from
there. Each slice is summed by one rank, so all ranks have the same bits. A rank's own slice is only read into its cache
and written back, which for two ranks saves half of all copies.

A batch is synchronized by three counters per rank, which count batches over the ring's life:

- *posted*: it is in the rank's slot and may be summed;
- *reduced*: the rank has summed its slice, so results may be read, and this rank no longer needs the slots;
- *read*: the rank has copied it out, so this rank no longer needs the result slot.

An averaging starts at a multiple of the ring's size, so that each batch of a list always uses the same slots and its
views are created once.

The caller must ensure that all ranks average the same list: the ranks compare fingerprints beforehand.

For short lists, waiting takes longer than copying. A rank posts such a list before the ranks exchange fingerprints, and
if all ranks have, each of them sums all of it, without waiting again. It uses the slots in turn: once the next
fingerprints have been exchanged, all ranks have read the previous list.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nano_loop.distributed.comm.averaging_math import divide, is_summed_wider, set_to_mean
from nano_loop.distributed.comm.packing import Batch, Places, Signature, pack, signature
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_segment import LINE, SharedSegment
from nano_loop.patching.torch_private import foreach_copy

_COUNTERS = range(3)

_CHUNK = 1 << 20  # bytes copied, summed and copied back at a time; the ring fits into a cache
_SLOTS = 3  # one is copied in, one summed, one copied out
_MOST_PLANS = 64
_SHORT = 1 << 19  # bytes of the other ranks' lists that a rank reads itself


class SharedMemoryTransport:
    """Averages through a ring of slots in a file that ranks of one host map. The constructor is collective."""

    def __init__(self, ranks: Ranks, mapped: Callable[[int], mmap.mmap], *, chunk: int = _CHUNK) -> None:
        rows = _SLOTS * (ranks.size + 1)
        self._segment = SharedSegment(ranks, len(_COUNTERS), rows * chunk, mapped)
        self._rank, self._size = ranks.rank, ranks.size
        self._chunk = chunk
        self._memory = self._segment.memory.view(_SLOTS, ranks.size + 1, -1)  # the last slot of a row is the result's
        self._posted, self._reduced, self._read = map(self._segment.places, _COUNTERS)
        self._base = 0  # batches so far, including those skipped at the end of a list
        self._plans: dict[Signature, _Plan] = {}  # valid for the ring's life
        self._turn = 0  # the slot of the latest call of `post`

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor in place by its mean over all ranks, bitwise identical on every rank. Collective.

        The tensors are contiguous, on the CPU, of a 16-, 32- or 64-bit float, and match on every rank. The order of
        operations is the same on all ranks, and none waits for a later one.
        """
        plan = self._plan(signature(tensors))
        self._segment.begin()
        stages, last = plan.stages, len(plan.stages)
        for number in range(last + 2):
            for delay, step in enumerate((self._post, self._reduce, self._copy_out)):
                if 0 <= number - delay < last:
                    step(stages[number - delay], number - delay, tensors)
        self._base += plan.length
        self._segment.end()

    def post(self, tensors: Sequence[torch.Tensor] | None) -> bool:
        """Copy a short list, or None, to shared memory, and return whether it is one. Collective.

        If all ranks have posted theirs, and have exchanged anything since, `average_posted` may replace `average`. A
        rank without a list passes None, so that all ranks keep using the same slot.
        """
        self._turn = 1 - self._turn
        short = None if tensors is None else self._plan(signature(tensors)).short
        if tensors is None or short is None:
            return False
        short.inputs[self._turn].copy_from(tensors)
        return True

    def average_posted(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor of the list that this rank has posted last; see `average`. Not collective."""
        short = self._plan(signature(tensors)).short
        assert short is not None
        set_to_mean(short.mean, short.rows[self._turn])
        short.outputs.copy_to(tensors)

    def close(self) -> None:
        """Release all memory."""
        self._plans = {}
        self._memory = self._memory.new_empty(0)
        self._segment.close()

    def _plan(self, signature: Signature) -> _Plan:
        """Return the views for averaging a list."""
        if signature not in self._plans:
            if len(self._plans) == _MOST_PLANS:
                self._plans.clear()
            batches = pack(signature, self._chunk)
            length = -(-len(batches) // _SLOTS) * _SLOTS
            counts = [*range(1, len(batches)), length]  # the last batch also counts the skipped slots
            stages = [self._stage(*batch) for batch in zip(batches, range(length), counts, strict=False)]
            self._plans[signature] = _Plan(stages, length, self._short(batches))
        return self._plans[signature]

    def _short(self, batches: Sequence[Batch]) -> _Short | None:
        if len(batches) != 1 or batches[0].nbytes * (self._size - 1) > _SHORT:
            return None
        (batch,) = batches
        rows = [[*self._memory[turn, :-1, : batch.nbytes].view(batch.dtype)] for turn in range(2)]
        mean = torch.empty_like(rows[0][0])
        inputs = [Places(batch.pieces, row[self._rank]) for row in rows]
        return _Short(inputs, rows, mean, Places(batch.pieces, mean))

    def _post(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self._segment.wait(self._reduced, self._base + number + 1 - _SLOTS)
        stage.inputs.copy_from(tensors)
        self._segment.publish(self._posted[self._rank], self._base + stage.count)

    def _reduce(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self._segment.wait(self._posted, self._base + number + 1)
        self._segment.wait(self._read, self._base + number + 1 - _SLOTS)
        stage.average(tensors)
        self._segment.publish(self._reduced[self._rank], self._base + stage.count)

    def _copy_out(self, stage: _Stage, number: int, tensors: Sequence[torch.Tensor]) -> None:
        self._segment.wait(self._reduced, self._base + number + 1)
        stage.outputs.copy_to(tensors)
        self._segment.publish(self._read[self._rank], self._base + stage.count)

    def _stage(self, batch: Batch, number: int, count: int) -> _Stage:
        slot = self._memory[number % _SLOTS]
        row = slot[:, : batch.nbytes].view(batch.dtype)
        # Align slices to cache lines, so that no two ranks write to the same line.
        length = -(-batch.length // self._size)
        length = -(-length // LINE) * LINE
        start, stop = (min(rank * length, batch.length) for rank in (self._rank, self._rank + 1))
        return _Stage(batch, start, stop, self._rank, row, count)


class _Stage:
    """The views of a batch into `rows`: shared memory, one row per rank, and one for the means.

    This rank sums the slice from `start` to `stop`. `count` is that of batches after this one.
    """

    def __init__(self, batch: Batch, start: int, stop: int, rank: int, rows: torch.Tensor, count: int) -> None:
        own, others = batch.between(start, stop), [*batch.between(0, start), *batch.between(stop, batch.length)]
        self.inputs, self.outputs = Places(others, rows[rank]), Places(others, rows[-1])
        self.count = count
        self._own, self._result = Places(own, rows[rank]), Places(own, rows[-1])
        self._parts, self._mean = rows[:-1, start:stop], rows[-1, start:stop]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite this rank's elements and those of the result by the means over all ranks, in one pass."""
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
class _Short:
    """The views of a short list: into this rank's slots and all ranks', used in turn, and its memory for the means."""

    inputs: list[Places]
    rows: list[list[torch.Tensor]]
    mean: torch.Tensor
    outputs: Places


@dataclass(frozen=True)
class _Plan:
    """How a list of tensors passes through a ring."""

    stages: list[_Stage]
    length: int  # number of slots, a multiple of the ring's size
    short: _Short | None  # for short lists only
