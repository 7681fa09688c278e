"""How ranks share each batch (``split_batches=True``): which samples are this rank's, and what they weigh.

A batch of B samples is computed by N ranks together: each takes a contiguous share, and gradients, losses, statistics
of batch norm and random numbers are those of one process that computes the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Share(NamedTuple):
    """One rank's part of one batch.

    Parameters
    ----------
    start, stop : int
        The samples that are this rank's: those of the numbers from `start` to `stop` - 1.
    total : int
        How many samples the batch has.
    size : int
        How many ranks share it.
    """

    start: int
    stop: int
    total: int
    size: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Share:
        """Return the share of `rank`: B // N samples or one more; all of them where a rank would have none."""
        if total < size:
            return cls(0, total, total, size)
        least, more = divmod(total, size)
        start = rank * least + min(rank, more)
        return cls(start, start + least + (rank < more), total, size)

    @property
    def count(self) -> int:
        """How many samples are this rank's."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes the whole batch."""
        return self.count == self.total

    @property
    def weight(self) -> float:
        """What multiplies a mean over this rank's samples, so that the mean over ranks is that over the batch."""
        return 1.0 if self.is_whole else self.size * self.count / self.total


@dataclass
class SplitBatches:
    """What a rank knows of the batches that its run splits; ``ranks.context.split``, None where none are.

    Attributes
    ----------
    share : Share or None
        Of the batch that a split loader has delivered last to the loop's thread; None before the first.
    reduction : {"mean", "sum"}
        What the loss is over samples, as the witness has found; a sum's shares have weight N.
    """

    share: Share | None = None
    reduction: Literal["mean", "sum"] = "mean"

    @property
    def weight(self) -> float:
        """What multiplies the gradient at the root of a backward on this rank."""
        if self.share is None or self.share.is_whole:
            return 1.0
        return float(self.share.size) if self.reduction == "sum" else self.share.weight
