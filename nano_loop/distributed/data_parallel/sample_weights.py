"""Notices losses of later steps that are not means over samples, if ranks share each batch (``split_batches=True``).

The witness compares gradients of the first step only. Later, a loop may drop samples with small losses, mix samples, or
add a loss of pairs of samples, whose factor may have been 0 in the first step. There are these signs:

- A loss is computed from scalars that reduce samples, such as means, or from vectors, such as the mean over the first
  dimension. The gradient that arrives at one, divided by the number of elements of a mean, is the weight of an element.
  It must be equal on all ranks, or in proportion to their shares if all reduce equally many elements, as with a penalty
  that each of them computes.
- The loss has operators that combine samples, such as a sort, through which no gradient passed when gradients were
  compared, or a line that calls one for the rows of a share, such as a flip, ran first after that.
- The loop scales gradients that `torch.autograd.grad` has computed by another factor on each rank, as by clipping.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nano_loop.distributed.comm.split_batches import CHECK_INTERVAL, CHECKED
from nano_loop.distributed.data_parallel.checksums import Pair, sum_and_norm
from nano_loop.distributed.data_parallel.combining_operators import adds_samples, call_combines, combines
from nano_loop.distributed.data_parallel.loss_graph import before_layers, reductions
from nano_loop.errors import error_message
from nano_loop.patching.optimizers import is_in_step
from nano_loop.patching.torch_private_autograd import input_shape, output_numel
from nano_loop.patching.user_code import users_place, warn

#: Maximum number of reductions: a loss with more may be computed sample by sample.
_MOST_WEIGHTS = 8
#: How many gradients show a scaling; their smallest sum, relative to their norm; the largest difference of its factors.
_MOST_SCALED, _LEAST_SUM, _SAME_FACTOR = 4, 1e-2, 1e-4
_RULE = "with split_batches, a loss must be a mean or a sum over independent samples in every step"
_WAYS = (
    "Divide a sum of losses by the count of all ranks and by nano_loop.share(), mix samples in collate_fn, clip "
    "gradients after loss.backward(), or pass split_batches=False. Only the first step is compared with whole batches"
)


class Weight(NamedTuple):
    """An element's factor in the loss of the whole batch, and in that of this rank, and the reduction's elements."""

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
        self._operators: set[str] = set()  # through which compared gradients have passed, and lines that call some
        self._later: set[str] = set()  # likewise, in the current backward
        self._lines: set[str] = set()  # lines that have called some since the last averaging
        self._computed: dict[int, Pair | None] = {}  # by parameter id; None if computed twice since the last step
        self._backwards = 0
        self.was_compared = False  # whether gradients were compared with those of whole batches
        self._checks = True
        self._has_warned = False

    def watch(self, losses: Sequence[Tensor], weight: float, samples: int) -> None:
        """Record the weights of samples in a backward that begins now with the gradient `weight` at its `losses`."""
        self.take()
        self._later.clear()
        self._computed.clear()
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

    def note_call(self, samples: int, operator: str, frame: FrameType, *args: Any, **kwargs: Any) -> None:
        """Record the line of a call that combines this rank's samples; see `calls_noted`.

        Until gradients are compared, all calls count: another number of samples may be the length of a table. Calls of
        libraries and of optimizers do not count.
        """
        if self._has_warned or (self.was_compared and not call_combines(operator, samples, *args, **kwargs)):
            return
        place = users_place()
        if place is not None and place.names is frame.f_globals and not is_in_step(frame):
            self._lines.add(f"{operator.partition('.')[0]} in {os.path.basename(place.filename)}:{place.number}")

    def note_computed(self, inputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Record the gradients that `torch.autograd.grad` has computed for some parameters among its inputs."""
        pairs = zip(inputs, gradients, strict=False)
        for parameter, gradient in [pair for pair in pairs if isinstance(pair[0], nn.Parameter)][:_MOST_SCALED]:
            is_first = id(parameter) not in self._computed
            self._computed[id(parameter)] = sum_and_norm(gradient) if is_first else None

    def note_scaled(self, parameters: Sequence[Tensor]) -> None:
        """Record the factors by which the loop has scaled them, before they are averaged, as further weights."""
        for parameter in parameters:
            sum_, norm = self._computed.get(id(parameter)) or (0.0, 0.0)
            if abs(sum_) > _LEAST_SUM * norm and parameter.dtype.itemsize >= 4:
                total, size = sum_and_norm(parameter.grad)
                if math.isclose(total / sum_, size / norm, rel_tol=_SAME_FACTOR):  # otherwise, it is more than a factor
                    self._weights.append(Weight(size / norm, size / norm, 1))
        self._computed.clear()

    def take(self) -> tuple[Weight, ...]:
        """Return the weights in the last backward, and forget them."""
        weights, self._weights = self._weights, []
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return tuple(weights[: _MOST_WEIGHTS + 1])

    def compare(self, by_rank: Sequence[Sequence[Weight]], tolerance: float, *, is_compared: bool) -> None:
        """Warn once if ranks weight samples differently, or a loss combines them, unlike in compared gradients."""
        later, self._lines = self._later | self._lines, set()
        known = [weights for weights in by_rank if 0 < len(weights) <= _MOST_WEIGHTS]  # a rank may have no samples
        are_equal = all(_are_equal(known[0], weights, tolerance) for weights in known[1:])
        if is_compared:
            self.was_compared, self._checks = True, self._checks and are_equal
            self._operators |= later
            return
        new = later - self._operators if self.was_compared else set()
        differ = self._checks and not are_equal
        if self._has_warned or not (differ or new):
            return
        self._checks, self._has_warned = False, True
        got = f"a loop that combines samples since the first step, by {', '.join(sorted(new))}"
        if not new:
            weights = [[float(f"{one.total:.3g}") for one in of_rank] for of_rank in by_rank]
            got = f"a loop that weights samples differently on each rank, by {weights}"
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
