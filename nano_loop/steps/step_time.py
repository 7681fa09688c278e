"""Times the steps of a loop, for the report: two runs show what an option gains."""

from __future__ import annotations

from typing_extensions import override

from nano_loop.runtime.clock import StepTimes
from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step


class StepTime(Step):
    """Reports the median time from the end of one ``optimizer.step()`` to the end of the next.

    It gains nothing by itself. With several optimizers, the first one that is set up counts.
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
