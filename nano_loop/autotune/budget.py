"""How long the measurements of a run may take, by the steps of its optimizers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from nano_loop.patching.objects.optimizers import hook_after_steps

#: How long measurements may take: this many steps, and from then on this share of the time of the run. One that would
#: take longer is given up when that is seen, so a hundred steps take less than 3% more.
STEPS, SHARE = 1.8, 0.018


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
    in_advance : bool
        Whether there is time before the share of the run is as long as some steps. Kernels that are not measured within
        the first steps are given up.
    """

    def __init__(
        self,
        measures: bool,
        at_turn: Callable[[], None] = lambda: None,
        part: float = 1.0,
        in_advance: bool = True,
    ) -> None:
        #: Changes when there may be time again for what had to wait, or choices of rank 0: the more steps there were,
        #: the more seldom, since to ask again takes time too.
        self.turn = 0
        self._measures = measures
        self._at_turn = at_turn
        self._part, self._in_advance = part, in_advance
        self._thread = threading.get_ident()
        self._first = self._last = 0.0
        self._steps = 0
        self._step = float("inf")
        self._hook = hook_after_steps(self._note)

    def left(self, spent: float) -> float:
        """Return how many seconds measurements may still take, where `spent` have been spent before."""
        if self._steps < 2 or not self._measures or threading.get_ident() != self._thread:
            return 0.0
        seconds = SHARE * (time.perf_counter() - self._first)
        if self._in_advance:
            seconds = max(seconds, STEPS * self._step)
        return self._part * seconds - spent

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _note(self, *_: Any) -> None:
        """Note the end of a step, of any optimizer."""
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter()
        if self._steps:
            # The shortest: a step in which something was measured is longer.
            self._step = min(self._step, now - self._last)
        else:
            self._first = now
        self._last = now
        self._steps += 1
        if self.turn != self._steps.bit_length():
            self.turn = self._steps.bit_length()
            self._at_turn()
