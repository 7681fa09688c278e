"""Times the steps of a loop, from the end of one ``optimizer.step()`` to the end of the next."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise

import numpy as np
from torch.optim import Optimizer

#: The first steps include warm-up costs: page faults, creation of oneDNN primitives, first reads of files.
_WARMUP, _ENOUGH, _LAST = 3, 5, 1000


class Stopwatch:
    """Records when each step of an optimizer ends, until it is closed.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer. It gets a hook after ``step``, which `close` removes.
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
        """Return the median time of the last thousand steps in milliseconds, or None if there were too few steps."""
        ends = list(self._ends)
        seconds = [end - begin for begin, end in pairwise(ends)]
        return float(np.median(seconds)) * 1e3 if len(seconds) >= _ENOUGH else None

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()
