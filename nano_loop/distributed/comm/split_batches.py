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

import torch

from nano_loop.errors import NanoError, error_message
from nano_loop.patching.walk import find

#: What the exchange is for in which ranks choose the weight of their losses.
REDUCTION = "the first backward of a split batch"


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
    reduction : {"mean", "sum"} or None
        What the loss is over samples, as the witness has found; a sum's shares have weight N. None, as for a mean,
        before the first backward.
    sums : tuple of float
        Those of the samples that were delivered last, before the first backward; see `batch_sums`.
    thread : int
        The loop's.
    since_backward : mapping
        The shares delivered since the last backward, by the iteration, which is not kept alive.
    """

    share: Share | None = None
    reduction: Literal["mean", "sum"] | None = None
    sums: tuple[float, ...] = ()
    thread: int = field(default_factory=threading.get_ident)
    since_backward: MutableMapping[Any, Share] = field(default_factory=WeakKeyDictionary)

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self.thread

    def deliver(self, iteration: Any, share: Share | None, batch: Any = None) -> None:
        """Note the share of the batch that an iteration delivers now; None of one that every rank computes whole."""
        self.share = share
        if self.reduction is None:
            self.sums = batch_sums(batch)
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

    def explain(self, error: RuntimeError | ValueError) -> None:
        """Let an error of the loop before its first backward say that the rank has had a part of the batch."""
        share = self.share
        if not isinstance(error, NanoError) and self.reduction is None and share is not None and not share.is_whole:
            got = f"{type(error).__name__} with {share.samples} of {share.total} samples ({error})"
            expected = "with split_batches each rank computes its part of a batch"
            hint = "Take the number of samples from the batch, such as len(x), and not a constant"
            raise NanoError(error_message(got, expected, hint)) from error

    @property
    def weight(self) -> float:
        """What multiplies the gradient at the root of a backward on this rank."""
        if self.share is None or self.share.is_whole:
            return 1.0
        return float(self.share.size) if self.reduction == "sum" else self.share.weight


def batch_sums(batch: Any) -> tuple[float, ...]:
    """Return a sum of each tensor of a batch, by which it is known again: of floats, where it has any.

    The elements of a sample have weights, so that an image that is flipped has another sum.
    """
    tensors = [tensor for tensor in find(torch.Tensor, batch) if _can_be_added(tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return tuple(map(_weighted_sum, floats or tensors))


def _can_be_added(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_dense and tensor.numel() > 0 and not tensor.is_complex()


def _weighted_sum(tensor: torch.Tensor) -> float:
    samples = tensor.detach().double()
    total = (samples if tensor.ndim else samples.reshape(1)).sum(0).flatten()
    return float(total @ torch.linspace(1, 2, len(total), dtype=torch.float64))
