"""Times the steps of a loop, for the report: two runs show what an option gains."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import pairwise

from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step

#: The first steps are not measured. They include warm-up costs: page faults, creation of oneDNN primitives, and first
#: reads of files.
_WARMUP, _ENOUGH, _LAST = 3, 5, 1000


class StepTime(Step):
    """Reports the median time of the last thousand steps of the first optimizer, and accelerates nothing."""

    name = "step_time"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._optimizer: Callable[[], Optimizer | None] | None = None
        self._steps = 0
        self._ends: deque[float] = deque(maxlen=_LAST + 1)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self._optimizer is None:
            self._optimizer = weakref.ref(parts.optimizers[0])
            self.undoing.callback(self.clock.after(self._note))
        return "measured until the run ends"

    @override
    def final_result(self) -> StepResult | None:
        if self._optimizer is None:
            return None
        seconds = [end - begin for begin, end in pairwise([*self._ends])]
        is_enough = len(seconds) >= _ENOUGH
        detail = f"{duration(statistics.median(seconds))} per step (median)" if is_enough else "too few steps to tell"
        return StepResult(self.name, "measured", detail)

    def _note(self, optimizer: Optimizer) -> None:
        if self._optimizer is not None and optimizer is self._optimizer():
            self._steps += 1
            if self._steps > _WARMUP:
                self._ends.append(time.perf_counter())
