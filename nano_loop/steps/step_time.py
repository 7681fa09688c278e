"""Times the steps of a loop, for the report: two runs show what an option gains."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from itertools import pairwise

from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.runtime.clock import StepClock
from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step

#: The first steps are not measured. They include warm-up costs: page faults, creation of oneDNN primitives, and first
#: reads of files.
_WARMUP, _ENOUGH, _LAST = 3, 5, 1000


class StepTime(Step):
    """Reports the median time from the end of one ``optimizer.step()`` to the end of the next.

    It does not accelerate anything. With several optimizers, it times the first one that is set up.
    """

    name = "step_time"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._times: StepTimes | None = None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self._times is None:
            self._times = StepTimes(self.clock, parts.optimizers[0])
        return "measured until the run ends"

    @override
    def final_result(self) -> StepResult | None:
        if self._times is None:
            return None
        median = self._times.median()
        detail = "too few steps to tell" if median is None else f"{duration(median)} per step (median)"
        return StepResult(self.name, "measured", detail)


class StepTimes:
    """The times of one optimizer's steps, from the end of one to the end of the next, by the clock of its run."""

    def __init__(self, clock: StepClock, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._steps = 0
        self._ends: deque[float] = deque(maxlen=_LAST + 1)
        clock.after(self._note)

    def median(self) -> float | None:
        """Return the median time of the last thousand steps in seconds, or None if there were too few steps."""
        seconds = [end - begin for begin, end in pairwise([*self._ends])]
        return statistics.median(seconds) if len(seconds) >= _ENOUGH else None

    def _note(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer():
            self._steps += 1
            if self._steps > _WARMUP:
                self._ends.append(time.perf_counter())
