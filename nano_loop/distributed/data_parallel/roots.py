"""Gradients and values at the roots of a backward, where ranks share a batch (``split_batches=True``).

A rank's loss is a mean over its share. So the gradient at the root is multiplied by the share's weight, and the mean of
all ranks' gradients is that of the loss of the whole batch, whatever several backwards add up before it is averaged.
Afterwards the root's value is the loss of the whole batch, too, on every rank.

What `torch.autograd.grad` returns has no weight: it may be the gradient of an input, as for a gradient penalty. Where
the loop makes gradients of parameters of it, they get the weight when they are averaged.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from nano_loop.distributed.comm.split_batches import SplitBatches
from nano_loop.distributed.data_parallel.witness import Comparison, losses_among
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.calls.backward import roots_weighted


class WeightedRoots:
    """The roots of the backwards of one rank.

    Parameters
    ----------
    split : SplitBatches
        What the rank knows of its share.
    comparison : Comparison
        Of its gradients with those of whole batches.
    """

    def __init__(self, split: SplitBatches, comparison: Comparison) -> None:
        self._split = split
        self.comparison = comparison
        self._roots: list[weakref.ref[torch.Tensor]] = []  # of the backward that runs, whose values are losses
        self._weight = 1.0

    def weighted(self) -> AbstractContextManager[None]:
        """Return a context in which the backwards of the loop's thread begin with weighted gradients."""
        return roots_weighted(self._weigh)

    def values(self) -> tuple[float, ...]:
        """Return what this rank adds to the values of the roots, whose mean over the ranks is that of the batch."""
        return tuple(self._weight * float(root.detach()) for root in self._alive())

    def become_means(self, values: Sequence[tuple[float, ...]]) -> None:
        """Give the roots their values, of what all ranks have returned by `values`, and forget them.

        A root gets new memory: what the graph has saved of it, and what the loop has read before, stays as it was.
        """
        roots, self._roots = self._alive(), []
        if len({len(of_rank) for of_rank in values}) > 1 or (share := self._split.share) is None or share.is_whole:
            return
        means = [sum(parts) / len(parts) for parts in zip(*values, strict=True)]
        self.comparison.note_losses(means)
        for root, mean in zip(roots, means, strict=True):
            root.data = torch.full_like(root.detach(), mean)

    def scale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Multiply gradients that the loop has computed itself by the weight of this rank's share."""
        weight = self._split.weight
        for parameter in parameters:
            if weight != 1 and parameter.grad is not None:
                parameter.grad = parameter.grad * weight

    def _alive(self) -> list[torch.Tensor]:
        return [root for reference in self._roots if (root := reference()) is not None]

    def _weigh(self, tensors: Any, grad_tensors: Any) -> Any:
        if not self._split.is_here:
            return grad_tensors
        losses = losses_among(tensors)
        self.comparison.begin_backward(losses)
        self._weight = weight = self._split.begin_backward()
        self._roots = [weakref.ref(loss) for loss in losses]
        is_one = isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge))
        roots = [tensors] if is_one else [*tensors]
        gradients = [*grad_tensors] if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(roots)
        if weight == 1 or len(gradients) != len(roots):  # torch says so
            return grad_tensors
        return [_weighted(root, gradient, weight) for root, gradient in zip(roots, gradients, strict=True)]


def _weighted(root: Any, gradient: torch.Tensor | None, weight: float) -> torch.Tensor | None:
    if gradient is not None:
        return gradient * weight
    if isinstance(root, torch.Tensor):
        return torch.full_like(root, weight) if root.numel() == 1 else None  # torch asks for one
    got, expected = "a backward from a GradientEdge without a gradient", "with split_batches it gets a weight"
    raise NanoError(error_message(got, expected, "Pass grad_tensors, such as torch.ones(())"))
