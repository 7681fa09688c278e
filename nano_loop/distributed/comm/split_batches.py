"""How ranks share each batch (``split_batches=True``): which samples are this rank's, and what they weigh.

A batch of B samples is computed by N ranks together: each takes a contiguous share, and gradients, losses, statistics
of batch norm and random numbers are those of one process that computes the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from nano_loop.errors import NanoError, error_message


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
    def samples(self) -> int:
        """How many samples are this rank's."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes the whole batch."""
        return self.samples == self.total

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same weight."""
        return self.is_whole or self.total % self.size == 0

    @property
    def weight(self) -> float:
        """What multiplies a mean over this rank's samples, so that the mean over ranks is that over the batch."""
        return 1.0 if self.is_whole else self.size * self.samples / self.total


@dataclass
class SplitBatches:
    """What a rank knows of the batches that its run splits; ``ranks.context.split``, None where none are.

    Attributes
    ----------
    share : Share or None
        Of the batch that a split loader has delivered last to the loop's thread; None before the first.
    reduction : {"mean", "sum"}
        What the loss is over samples, as the witness has found; a sum's shares have weight N.
    thread : int
        The loop's.
    since_backward : mapping
        The shares delivered since the last backward, by the iteration, which is not kept alive.
    """

    share: Share | None = None
    reduction: Literal["mean", "sum"] = "mean"
    thread: int = field(default_factory=threading.get_ident)
    since_backward: MutableMapping[Any, Share] = field(default_factory=WeakKeyDictionary)

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self.thread

    def deliver(self, iteration: Any, share: Share | None) -> None:
        """Note the share of the batch that an iteration delivers now; None of one that every rank computes whole."""
        self.share = share
        if share is not None:
            self.since_backward[iteration] = share

    def begin_backward(self) -> float:
        """Return the weight for the backward that begins.

        Raises
        ------
        NanoError
            If the batches that were delivered for it have shares of different weights.
        """
        shares = [*self.since_backward.values()]
        self.since_backward.clear()
        if len({None if share.is_even else share.total for share in shares}) > 1:
            counts = ", ".join(f"{share.samples} of {share.total}" for share in shares)
            got = f"a backward after batches of which this rank has {counts} samples"
            expected = "loaders that are iterated together must be split in the same ratio"
            size = shares[0].size
            hint = f"Make their batches of one size, or of multiples of {size} samples, with drop_last=True"
            raise NanoError(error_message(got, expected, hint))
        return self.weight

    @property
    def weight(self) -> float:
        """What multiplies the gradient at the root of a backward on this rank."""
        if self.share is None or self.share.is_whole:
            return 1.0
        return float(self.share.size) if self.reduction == "sum" else self.share.weight
