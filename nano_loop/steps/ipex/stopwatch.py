"""Times the steps of a loop, from the end of one ``optimizer.step()`` to the end of the next."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise

from torch.optim import Optimizer

#: The first steps pay for warming up: page faults, oneDNN's primitives, files that are read for the first time.
_WARMUP, _ENOUGH, _LAST = 3, 5, 1000


class Stopwatch:
    """Notes when each step of an optimizer ends, until it is closed.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Gets a hook after its ``step``; `close` takes it off.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._steps = 0
        self._ends: deque[float] = deque(maxlen=_LAST + 1)
        self._hook = optimizer.register_step_post_hook(self._note)

    def _note(self, *_: object) -> None:
        self._steps += 1
        if self._steps > _WARMUP:
            self._ends.append(time.perf_counter())

    def median_ms(self) -> float | None:
        """Return the median of the last thousand steps, in milliseconds; None where there were too few."""
        ends = list(self._ends)
        seconds = [end - begin for begin, end in pairwise(ends)]
        return statistics.median(seconds) * 1e3 if len(seconds) >= _ENOUGH else None

    def close(self) -> None:
        """Take the hook off."""
        self._hook.remove()
