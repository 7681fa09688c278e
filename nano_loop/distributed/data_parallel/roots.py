"""Gradients and values at the roots of a backward, if ranks share a batch (``split_batches=True``).

A rank's loss is a mean over its share. So the gradient at the root is multiplied by the share's weight, and the mean of
all ranks' gradients is the gradient of the whole batch's loss, no matter how many backwards are accumulated before the
averaging. Afterwards, the root's value also becomes the loss of the whole batch on every rank.

The results of `torch.autograd.grad` are not weighted: they may be gradients of inputs, as for a gradient penalty. If
the loop uses them as gradients of parameters, they are weighted when they are averaged.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.split_batches import SplitBatches
from nano_loop.distributed.data_parallel.comparison import Comparison
from nano_loop.distributed.data_parallel.sample_weights import SampleWeights, Weight
from nano_loop.distributed.data_parallel.witness import losses_among
from nano_loop.patching.calls.backward import roots_weighted
from nano_loop.patching.torch_private import in_functorch


class WeightedRoots:
    """The roots of the backwards of one rank, whose gradients are compared with those of whole batches."""

    def __init__(self, split: SplitBatches, comparison: Comparison) -> None:
        self._split = split
        self.comparison = comparison
        self._roots: list[weakref.ref[torch.Tensor]] = []  # loss values of the current backward
        self._weight = 1.0
        self.sample_weights = SampleWeights()

    def weighted(self) -> AbstractContextManager[None]:
        """Return a context in which backwards of the loop's thread start with weighted gradients."""
        return roots_weighted(self._weigh, self._note_computed)

    def values(self) -> tuple[float, ...]:
        """Return this rank's contributions to the roots' values, whose mean over the ranks is that of the batch."""
        return tuple(self._weight * float(root.detach()) for root in self._alive())

    def become_means(self, values: Sequence[tuple[float, ...]]) -> None:
        """Set the roots' values to the means, in new memory, so that what the graph has saved does not change."""
        roots, self._roots = self._alive(), []
        if len({len(of_rank) for of_rank in values}) > 1 or (share := self._split.share) is None or share.is_whole:
            return
        means = [sum(parts) / len(parts) for parts in zip(*values, strict=True)]
        self.comparison.note_losses(means)
        for root, mean in zip(roots, means, strict=True):
            if float(root.detach()) != mean:  # the loss of a mean over all ranks' rows has it already
                root.data = torch.full_like(root.detach(), mean)

    def compare_weights(self, by_rank: Sequence[Sequence[Weight]]) -> None:
        """Warn if ranks weight samples differently, unless one may have a single sample, which needs no reduction."""
        share, is_compared = self._split.share, self.comparison.told is not None
        if share is not None and share.total >= 2 * share.size:
            self.sample_weights.compare(by_rank, self.comparison.tolerance, is_compared=is_compared)

    def scale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Multiply gradients that the loop itself has computed by the weight of this rank's share."""
        weight = self._split.begin_backward()
        self.sample_weights.note_scaled(parameters)
        for parameter in parameters:
            if weight != 1 and parameter.grad is not None:
                parameter.grad = parameter.grad * weight

    def _alive(self) -> list[torch.Tensor]:
        return [root for reference in self._roots if (root := reference()) is not None]

    def _note_computed(self, inputs: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._split.is_here and self._split.is_checked and not in_functorch():
            self.sample_weights.note_computed([inputs] if isinstance(inputs, torch.Tensor) else [*inputs], gradients)

    def _weigh(self, tensors: Any, grad_tensors: Any) -> Any:
        if not self._split.is_here:
            return grad_tensors
        losses = losses_among(tensors)
        self.comparison.begin_backward(losses)
        self._weight = weight = self._split.begin_backward()
        self._roots = [weakref.ref(loss) for loss in losses]
        self.sample_weights.watch(losses, weight, 0 if self._split.share is None else self._split.share.samples)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
        gradients = [*grad_tensors] if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(roots)
        if weight == 1 or len(gradients) != len(roots):  # torch raises the error
            return grad_tensors
        return [_weighted(root, gradient, weight) for root, gradient in zip(roots, gradients, strict=True)]


def _weighted(root: Any, gradient: torch.Tensor | None, weight: float) -> torch.Tensor | None:
    if gradient is not None:
        return gradient * weight
    return torch.full_like(root, weight) if root.numel() == 1 else None  # otherwise torch raises


def mean_loss(loss: Any, ranks: Ranks) -> Any:
    """Return the mean of all ranks' losses of a closure, so that line searches decide the same on all ranks."""
    if not isinstance(loss, (torch.Tensor, float)):
        return loss
    split = ranks.context.split
    if split is None:
        mean = ranks.mean(torch.as_tensor(loss, dtype=None if isinstance(loss, torch.Tensor) else torch.float64))
    else:
        own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        values, weights = zip(*ranks.gather((own, split.weight), AVERAGING), strict=True)
        # After a backward, every rank has the loss of the whole batch already.
        total = values[0] if len({*values}) == 1 else sum(map(operator.mul, values, weights)) / ranks.size
        mean = torch.tensor(total, dtype=loss.dtype if isinstance(loss, torch.Tensor) else torch.float64)
    return mean if isinstance(loss, torch.Tensor) else float(mean)
