"""How long the measurements of a run may take, by the steps of its optimizers."""

from __future__ import annotations

import time

from nano_loop.runtime.clock import StepClock

#: How long measurements may take: this many steps, and from then on this share of the time of the run. One that would
#: take longer is given up when that is seen, so a hundred steps take less than 3% more.
STEPS, SHARE = 1.8, 0.018


class Budget:
    """The time for all measurements of a run, in its thread: of operators, and of steps in other settings.

    It begins with the third step: in the first ones memory is taken and kernels are made.

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
        """Return how many seconds measurements may still take.

        Parameters
        ----------
        in_advance : bool
            Whether there is time before the share of the run is as long as some steps.
        """
        clock = self.clock
        if clock.steps < 2 or not self._measures or not clock.is_here:
            return 0.0
        seconds = SHARE * (time.perf_counter() - clock.began)
        # The shortest step: one in which something was measured is longer.
        return (max(seconds, STEPS * clock.shortest) if in_advance else seconds) - self._spent

    def spend(self, seconds: float) -> None:
        """Note that a measurement has taken some seconds."""
        self._spent += seconds
