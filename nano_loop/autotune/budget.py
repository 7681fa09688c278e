"""How long the measurements of a run may take, by the steps of its optimizers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from nano_loop.patching.objects.optimizers import hook_after_steps

#: The part of the time of the training so far that measurements may take. One that would take longer is given up when
#: that is seen.
SHARE = 0.018


class Budget:
    """The time for measurements in the loop of this thread, from its third step until it is closed.

    Parameters
    ----------
    measures : bool
        Whether there is any.
    at_turn : callable, optional
        Is called when `turn` changes.
    part : float
        How much of it there is, where another budget has the rest.
    """

    def __init__(self, measures: bool, at_turn: Callable[[], None] = lambda: None, part: float = 1.0) -> None:
        #: Changes when there may be time again for what had to wait, or choices of rank 0: the more steps there were,
        #: the more seldom, since to ask again takes time too.
        self.turn = 0
        self._measures = measures
        self._at_turn = at_turn
        self._part = part
        self._thread = threading.get_ident()
        self._first = 0.0
        self._steps = 0
        self._hook = hook_after_steps(self._note)

    def left(self, spent: float) -> float:
        """Return how many seconds measurements may still take, where `spent` have been spent before."""
        if self._steps < 2 or not self._measures or threading.get_ident() != self._thread:
            return 0.0
        return SHARE * self._part * (time.perf_counter() - self._first) - spent

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _note(self, *_: Any) -> None:
        """Note the end of a step, of any optimizer."""
        if threading.get_ident() != self._thread:
            return
        if not self._steps:
            self._first = time.perf_counter()
        self._steps += 1
        if self.turn != self._steps.bit_length():
            self.turn = self._steps.bit_length()
            self._at_turn()
