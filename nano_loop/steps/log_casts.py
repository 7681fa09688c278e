"""A step that logs the casts of one step of the loop, with their locations and costs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import override

from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.precision.cast_log import CastLog, CastRecorder
from nano_loop.runtime.objects.report import StepResult, print_lines
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step

#: The first steps are not representative: optimizers create their state, and products of new sizes are counted.
_AFTER_STEPS = 2


class LogCasts(Step):
    """Records the casts of the third step, from the end of ``optimizer.step()`` to the next, on rank 0.

    With several optimizers, this is the third step of all optimizers of the first setup.
    """

    name = "log_casts"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._names: Any = WeakIdKeyDictionary()  # by module
        self._is_applied = False
        self._recorder: CastRecorder | None = None
        self._ending = ExitStack()
        self._result: StepResult | None = None

    @override
    def observe(self, parts: TrainingObjects) -> None:
        if not self.enabled or self.options.compile:
            return  # hooks would make torch.compile recompile
        for model in parts.models:
            self._names.update({module: name or type(model).__name__ for name, module in model.named_modules()})

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._is_applied and self.ranks.rank == 0:
            self._is_applied, count = True, len(parts.optimizers)
            self.undoing.callback(self._close)
            self.undoing.callback(self.clock.before(self._mark))
            self.undoing.callback(self.clock.after(lambda _: self._ending.close()))
            self.undoing.callback(self.clock.in_steps(_AFTER_STEPS * count, self._record))
            self.undoing.callback(self.clock.in_steps((_AFTER_STEPS + 1) * count, self._finish))
        return "of the third step"

    @override
    def final_result(self) -> StepResult | None:
        if not self._is_applied:
            return None
        return self._result or StepResult(self.name, "skipped", "fewer than three steps", code="few_steps")

    def _record(self) -> None:
        self._recorder = CastRecorder({id(module): name for module, name in self._names.items()})

    def _mark(self, *_: object) -> None:
        if self._recorder is not None:
            self._ending.enter_context(self._recorder.in_optimizer())

    def _finish(self) -> None:
        if self._recorder is None:
            return
        log, self._recorder = self._recorder.finish(), None
        try:
            self._result = StepResult(self.name, "measured", log.summary() + self._written(log), log)
        except OSError as error:  # training continues without a log
            self._result = StepResult(self.name, "skipped", f"the log could not be written: {error}")
            return
        if self.options.log_casts is True and self.options.verbose:
            print_lines([log])

    def _written(self, log: CastLog) -> str:
        if self.options.log_casts is True:
            return ""
        path = Path(str(self.options.log_casts))
        path.write_text(json.dumps(log.as_dict(), indent=2) + "\n")
        return f", in {path.name}"

    def _close(self) -> None:
        self._ending.close()
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None
