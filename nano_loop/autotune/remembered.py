"""What was decided for shapes of gradients: until it is measured, a guess is taken for one turn of the tuner."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from nano_loop.autotune.tuner import Tuner

#: Maximum number of shapes that are remembered: a loop may have a new one in each batch.
_MOST_SHAPES = 1024
_SETTLED = -1

_T = TypeVar("_T")


class Remembered(Generic[_T]):
    """How gradients are computed, by the shapes of their tensors.

    Parameters
    ----------
    tuner : Tuner
        The one that measures.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._known: dict[Hashable, tuple[_T, int]] = {}  # and the turn in which it is a guess, or `_SETTLED`

    def way(self, shapes: Hashable, guess: _T, measured: Callable[[], _T | None]) -> _T:
        """Return the way for some shapes: `guess` while `measured`, which is asked once a turn, returns None."""
        known = self._known.get(shapes)
        if known is not None and known[1] in (_SETTLED, self._tuner.turn):
            return known[0]
        if len(self._known) >= _MOST_SHAPES:
            self._known.clear()
        found = measured()
        way, turn = (guess, self._tuner.turn) if found is None else (found, _SETTLED)
        self._known[shapes] = way, turn
        return way
