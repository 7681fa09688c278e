"""The time budget for the measurements of a run, based on the steps of its optimizers."""

from __future__ import annotations

import time

from nano_loop.runtime.clock import StepClock

#: The budget: this many steps at first, and later this fraction of the run's time. A measurement that would exceed it
#: is abandoned once that is detected, so a hundred steps take less than 3% longer.
STEPS, SHARE = 1.8, 0.018


class Budget:
    """The time for all measurements in a run's thread: of operators, and of steps with other settings.

    It starts with the third step: the first ones allocate memory and create kernels.

    Parameters
    ----------
    clock : StepClock
        Counts and times the steps.
    measures : bool
        Whether there is any time. Rank 0 measures for all ranks.
    """

    def __init__(self, clock: StepClock, measures: bool = True) -> None:
        self.clock, self._measures = clock, measures
        self._spent = 0.0

    def left(self, in_advance: bool = True) -> float:
        """Return the seconds that are left for measurements.

        Parameters
        ----------
        in_advance : bool
            Whether to allow some steps' worth of time before the run's fraction reaches it.
        """
        clock = self.clock
        if clock.steps < 2 or not self._measures or not clock.is_here:
            return 0.0
        seconds = SHARE * (time.perf_counter() - clock.began)
        # Use the shortest step, because steps with measurements take longer.
        return (max(seconds, STEPS * clock.shortest) if in_advance else seconds) - self._spent

    def spend(self, seconds: float) -> None:
        """Record the seconds that a measurement has taken."""
        self._spent += seconds
