"""Tells whether differences between the ranks' gradients and those of whole batches are rounding, or another loss.

In fp32, rounding changes the gradients of a deep network with ReLUs by 2%, and in bf16 by as much as their norm, but it
changes neither the loss nor the gradients of the last layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence, Set

import torch

#: The largest relative differences of the norm of all gradients, and of losses; in bf16; and in fp64, with fp32 parts.
TOLERANCE, ROUNDED, DOUBLE = 1e-3, 2e-2, 1e-6
_SAME_LOSSES = {TOLERANCE: 1e-5, ROUNDED: ROUNDED, DOUBLE: 1e-10}
_OF_ALL = 1e-2  # of the tolerance: differences that are smaller, relative to all gradients, do not count
_MOST_ROUNDING = 0.05


class Differences:
    """The differences of some gradients from those of whole batches, by place; a missing gradient is zero."""

    def __init__(
        self, gradients: Sequence[torch.Tensor | None], whole: Sequence[torch.Tensor | None], tolerance: float
    ) -> None:
        # Norms: of the differences, of the gradients of whole batches, and of all differences together.
        self.distances = [_distance(one, other) for one, other in zip(gradients, whole, strict=True)]
        self.sizes = [_distance(gradient, None) for gradient in whole]
        self._tolerance, self._size = tolerance, math.hypot(*self.sizes)
        total = math.hypot(*self.distances)
        self.is_off = total > tolerance * self._size  # whether the gradients as a whole differ
        #: Whether the difference is not larger than rounding makes it.
        self.is_bounded = tolerance == ROUNDED or total <= _MOST_ROUNDING * self._size

    def ratio(self, places: Collection[int]) -> float | None:
        """Return the relative difference at these places, or None if whole batches have no gradients there."""
        size = math.hypot(*(self.sizes[place] for place in places))
        return math.hypot(*(self.distances[place] for place in places)) / size if size else None

    def wrong_layer(self, ids: Sequence[int], last_layers: Iterable[Set[int]], earlier: Set[int]) -> list[int]:
        """Return the places of a last layer's parameters if some gradients of it differ and none is equal."""
        least = _OF_ALL * self._tolerance * self._size
        for layer in last_layers:
            places = [place for place, one in enumerate(ids) if one in layer and one not in earlier]
            own = [(self.distances[place], self.sizes[place]) for place in places]
            if any(off > max(least, self._tolerance * size) for off, size in own) and not any(
                off <= self._tolerance * size and size > least for off, size in own
            ):
                return places
        return []

    def may_be_rounding(self, losses: Sequence[float], others: Sequence[float]) -> bool:
        """Whether losses are the same, and so is the gradient of some parameter."""
        nearest = _SAME_LOSSES[self._tolerance]
        return (
            0 < len(losses) == len(others)
            and all(math.isclose(*pair, rel_tol=nearest) for pair in zip(losses, others, strict=True))
            and any(off <= self._tolerance * size > 0 for off, size in zip(self.distances, self.sizes, strict=True))
        )


def _distance(gradient: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the norm of the difference of two gradients; a missing gradient is zero."""
    one, two = (None if part is None else part.to_dense() for part in (gradient, other))
    rest = one if two is None else (-two if one is None else one - two)
    if rest is None:
        return 0.0
    return float(torch.linalg.vector_norm(rest, dtype=torch.complex128 if rest.is_complex() else torch.float64))
