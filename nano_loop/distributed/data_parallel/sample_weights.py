"""Notices losses of later steps that are not means over samples, if ranks share each batch (``split_batches=True``).

The witness compares gradients of the first step only. Later, a loop may drop samples with small losses, or add a loss
of pairs of samples, whose factor may have been 0 in the first step. There are two signs of this:

- A loss is computed from scalars that reduce samples, such as means, or from vectors, such as the mean over the first
  dimension. The gradient that arrives at one, divided by the number of elements of a mean, is the weight of an element.
  It must be equal on all ranks, or in proportion to their shares if all reduce equally many elements, as with a penalty
  that each of them computes.
- The loss has operators that combine samples, such as a sort, through which no gradient passed when gradients were
  compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.distributed.comm.split_batches import CHECK_INTERVAL, CHECKED
from nano_loop.errors import error_message
from nano_loop.kernels.head.cross_entropy import MEAN
from nano_loop.patching.torch_private_autograd import dimensions_of, input_shape, output_numel, reduction_of
from nano_loop.patching.user_code import warn

#: The key, in a node's metadata, of a loss that is a mean over all ranks' rows.
OVER_ALL_RANKS = "nano_loop: a mean over all ranks"
#: Beginnings of the names of operators that may combine samples, unless they act on another dimension.
_COMBINING = (
    *("Topk", "Sort", "Kthvalue", "Median", "Index", "MaskedSelect", "Mode", "Cum", "Roll", "Flip", "MaxB", "MinB"),
    *("Mm", "Bmm", "Cdist", "EuclideanDist", "PdistForward", "Std", "Var", "LinalgVectorNorm", "Norm", "Amax", "Amin"),
)
#: Those that combine samples in the first dimension only, and those that add samples there.
_ALONG_FIRST, _ADDING = ("Softmax", "LogSoftmax", "Logsumexp", "Prod"), ("MeanBackward1", "SumBackward1")
_MOST_NODES = 64
#: Maximum number of reductions: a loss with more may be computed sample by sample.
_MOST_WEIGHTS = 8
_RULE = "with split_batches, a loss must be a mean or a sum over independent samples in every step"
_WAYS = (
    "Divide a sum of losses by the count of all ranks and by nano_loop.share(), or pass split_batches=False. Only the "
    "first step is compared with whole batches"
)


class Weight(NamedTuple):
    """The weight of each element of a reduction on one rank.

    Parameters
    ----------
    total, own : float
        Its factor in the loss of the whole batch, and in that of this rank.
    elements : int
        The number of elements.
    """

    total: float
    own: float
    elements: int


class SampleWeights:
    """The weights of one rank's samples in each backward, and the operators that combine samples.

    If ranks weight samples differently while gradients are compared, they may be right in doing so, and their weights
    are no longer checked.
    """

    def __init__(self) -> None:
        self._weights: list[Weight] = []
        self._hooks: list[Any] = []
        self._operators: set[str] = set()  # through which compared gradients have passed
        self._later: set[str] = set()  # likewise, in the current backward
        self._backwards = 0
        self._was_compared = False
        self._checks = True

    def watch(self, losses: Sequence[Tensor], weight: float, samples: int) -> None:
        """Record the weights of samples in a backward that begins now.

        Parameters
        ----------
        losses : sequence of torch.Tensor
            The roots of the backward.
        weight : float
            Their gradient.
        samples : int
            The number of samples of this rank, which is the length of the first dimension of tensors with one row each.
        """
        self.take()
        self._later = set()
        self._backwards += 1
        if not self._checks or (self._backwards > CHECKED and self._backwards % CHECK_INTERVAL):
            return
        nodes = [loss.grad_fn for loss in losses]
        for node, elements, is_mean in reductions(nodes):
            note = partial(self._note, weight, elements, max(elements, 1) if is_mean else 1)
            self._hooks.append(node.register_prehook(note))
        for node in before_layers(nodes):
            if combines(node, samples):
                self._hooks.append(node.register_prehook(partial(self._note_operator, node.name())))
            elif adds_samples(node, samples):
                elements = math.prod(input_shape(node))
                count = elements / output_numel(node, 0) if node.name().startswith("Mean") else 1
                self._hooks.append(node.register_prehook(partial(self._note_vector, weight, elements, count)))

    def take(self) -> tuple[Weight, ...]:
        """Return the weights in the last backward, and forget them."""
        weights, self._weights = self._weights, []
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return tuple(weights[: _MOST_WEIGHTS + 1])

    def compare(self, by_rank: Sequence[Sequence[Weight]], tolerance: float, *, is_compared: bool) -> None:
        """Warn once if ranks weight samples differently, or a loss combines them, unlike in compared gradients.

        Parameters
        ----------
        by_rank : sequence of sequence of Weight
            The results of `take`.
        tolerance : float
            The largest relative difference of equal weights.
        is_compared : bool
            Whether the gradients of this backward are compared with those of whole batches.
        """
        if not self._checks:
            return
        known = [weights for weights in by_rank if 0 < len(weights) <= _MOST_WEIGHTS]  # a rank may have no samples
        are_equal = all(_are_equal(known[0], weights, tolerance) for weights in known[1:])
        if is_compared:
            self._was_compared, self._checks = True, are_equal
            self._operators |= self._later
            return
        new = self._later - self._operators if self._was_compared else set()
        if are_equal and not new:
            return
        self._checks = False
        got = f"a loss that combines samples since the first step, by {', '.join(sorted(new))}"
        if not are_equal:
            weights = [[float(f"{one.total:.3g}") for one in of_rank] for of_rank in by_rank]
            got = f"a loss that weights samples differently on each rank, by {weights}"
        warn(error_message(got, _RULE, _WAYS))

    def _note(self, weight: float, elements: int, count: int, gradients: Sequence[Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.numel() == 1:
                total = float(gradient.detach()) / count
                self._weights.append(Weight(total, total / weight, elements))

    def _note_vector(self, weight: float, elements: int, count: float, gradients: Sequence[Tensor | None]) -> None:
        """Record one number that the weights of all columns determine, if other reductions leave room for it."""
        (gradient,) = gradients
        if gradient is not None and len(self._weights) < _MOST_WEIGHTS:
            values = gradient.detach().double().flatten()
            total = float(values @ torch.linspace(1, 2, len(values), dtype=values.dtype)) / count
            self._weights.append(Weight(total, total / weight, elements))

    def _note_operator(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        if name not in self._later and any(gradient is not None and gradient.any() for gradient in gradients):
            self._later.add(name)


def _are_equal(some: Sequence[Weight], others: Sequence[Weight], tolerance: float) -> bool:
    """Whether each weight is one of the other rank's, in whichever order, since a loop may reduce each sample."""

    def has(weights: Sequence[Weight], one: Weight) -> bool:
        return any(
            math.isclose(one.total, other.total, rel_tol=tolerance)
            or (math.isclose(one.own, other.own, rel_tol=tolerance) and one.elements == other.elements)
            for other in weights
        )

    return all(has(others, one) for one in some) and all(has(some, one) for one in others)


def reductions(roots: Iterable[Any]) -> list[tuple[Any, int, bool]]:
    """Return the nodes nearest to scalar roots that reduce tensors, their numbers of elements, and which are means."""
    waiting, nodes = [*roots], []
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or len(seen) > _MOST_NODES:
            continue
        seen.add(node)
        inputs = [(one, output_numel(one, place)) for one, place in node.next_functions if one is not None]
        if node.metadata.get(OVER_ALL_RANKS):
            nodes.append((node, 1, False))
        elif all(size == 1 for _, size in inputs):
            waiting += [one for one, _ in inputs]
        else:
            is_mean = node.name().startswith("Mean") or reduction_of(node) == MEAN
            nodes.append((node, max(size for _, size in inputs), is_mean))
    return nodes


def before_layers(roots: Iterable[Any]) -> list[Any]:
    """Return the nodes between scalar roots and the last layers."""
    waiting = [*roots]
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or len(seen) > _MOST_NODES:
            continue
        inputs = [one for one, _ in node.next_functions]
        if not any(map(_is_of_parameter, inputs)):  # otherwise a layer
            seen[node] = None
            waiting += inputs
    return [*seen]


def combines(node: Any, samples: int) -> bool:
    """Whether an operator may combine samples: it does not act within the rows of this number of samples."""
    name = node.name()
    if name.startswith(_ALONG_FIRST):
        return _acts_on_first(node, samples)
    if not name.startswith(_COMBINING):
        return False
    is_of_rows = input_shape(node)[:1] == (samples,)
    return not is_of_rows or not dimensions_of(node) or _acts_on_first(node, samples)


def adds_samples(node: Any, samples: int) -> bool:
    """Whether a node is the sum or the mean of this number of samples, but no scalar."""
    return node.name().startswith(_ADDING) and _acts_on_first(node, samples) and output_numel(node, 0) > 1


def _acts_on_first(node: Any, samples: int) -> bool:
    return input_shape(node)[:1] == (samples,) and 0 in dimensions_of(node)


def _is_of_parameter(node: Any) -> bool:
    """Whether a node is a leaf, or a view of one, such as the transposed weight of a linear layer."""
    inputs = [] if node is None else node.next_functions
    return node is not None and (not inputs or (len(inputs) == 1 and hasattr(inputs[0][0], "variable")))
