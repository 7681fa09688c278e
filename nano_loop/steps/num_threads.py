"""Measures in steps of the loop whether one compute thread is faster than several (``num_threads="auto"``)."""

from __future__ import annotations

import threading

import torch
from typing_extensions import override

from nano_loop.patching.deterministic_mode import may_depend_on_times
from nano_loop.patching.patch_table import shared_change, users
from nano_loop.runtime.objects.report import StepResult, duration
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.trial import StepTrial
from nano_loop.steps.step import SkipReason, Step
from nano_loop.steps.threads import set_threads

_DETERMINISTIC = "torch.use_deterministic_algorithms is on"


class NumThreads(Step):
    """Alternates steps of an optimizer between one thread and several."""

    name = "num_threads"
    needs = "optimizers"

    @property
    @override
    def enabled(self) -> bool:
        return self.options.num_threads == "auto"

    @override
    def begin(self) -> None:
        self._trial: StepTrial[int] | None = None

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self.options.exact:
            return SkipReason("exact", "sums with another number of threads differ in bits, and exact is on")
        if not may_depend_on_times():
            return SkipReason("deterministic", _DETERMINISTIC)
        if self.ranks.size > 1:
            # What each rank computes from all gradients, such as their norm, would differ in bits between ranks.
            return SkipReason("several_processes", "all ranks use one number, so that they compute the same")
        if self.options.compile:
            return SkipReason("compiled", "compiled code keeps its number of threads")
        if self._trial is None and users(_key()):
            return SkipReason("other_run", "another run in this thread is measuring")
        if self._trial is None and torch.get_num_threads() == 1:
            return SkipReason("one_thread", "there is one thread")
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self._trial is None:
            settings = torch.get_num_threads(), 1
            self.undoing.enter_context(shared_change(_key(), lambda: set_threads(settings[0])))
            take, longer = torch.set_num_threads, max(settings) - 1
            self._trial = StepTrial(
                self.name, settings, take, self.budget, self.machine, longer=longer, present=torch.get_num_threads
            )
            self.undoing.callback(self._trial.end)
            self.undoing.callback(self.clock.after(self._trial.note))
        return f"1 or {max(self._trial.settings)}, measured in the first steps"

    @override
    def forget_times(self) -> None:
        if self._trial is not None:
            self._trial.forget()

    @override
    def final_result(self) -> StepResult | None:
        """Return the chosen number of threads, and the step times with each."""
        trial = self._trial
        if trial is None:
            return None
        if not may_depend_on_times():
            return StepResult(self.name, "measured", f"{trial.setting}: {_DETERMINISTIC}", code="deterministic")
        if not trial.medians:
            return StepResult(self.name, "measured", f"{trial.setting}: too few steps to tell", code="too_few_steps")
        times = ", ".join(f"{duration(time)} per step with {number}" for number, time in trial.medians.items())
        often = f"{f', measured {trial.measured} times' if trial.measured > 1 else ''}{trial.unsure}"
        code = "one_thread_is_faster" if trial.setting == 1 else "more_threads_stay"
        return StepResult(self.name, "measured", f"{trial.setting}: {times}{often}", code=code)


def _key() -> tuple[str, int]:
    return "num_threads", threading.get_ident()
