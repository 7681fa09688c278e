"""The slice of a batch that a rank sums: where its own gradients lie, so that these never go through shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nano_loop.distributed.comm.averaging_math import divide_each
from nano_loop.distributed.comm.packing import Batch, Places
from nano_loop.patching.torch_private import foreach_add, foreach_copy

#: What is summed in itself. Numbers of 16 bits are summed in another dtype, and complex ones as pairs.
SUMMED_IN_PLACE = (torch.float32, torch.float64)


class LocalShard:
    """Sums one slice of a batch over the ranks, in their order.

    Parameters
    ----------
    batch : Batch
        The batch, of a dtype of `SUMMED_IN_PLACE`.
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
