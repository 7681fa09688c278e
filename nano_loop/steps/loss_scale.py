"""Scales gradients for the backwards of fp16 models, and skips the steps of optimizers whose gradients overflowed."""

from __future__ import annotations

import re
import sys
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from nano_loop.errors import error_message
from nano_loop.patching.lifetime import weakly
from nano_loop.patching.objects.checkpoint_entries import SCALE, flattened_states_complete, pop_entry, with_entries
from nano_loop.precision.autocast.dtype_errors import note
from nano_loop.precision.autocast.loss_scale import LossScale
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step

#: What torch raises for gradients that are not finite: `clip_grad_norm_`, where it is asked to, and anomaly mode.
_ABOUT_OVERFLOW = re.compile("is non-finite|returned nan values")


class LossScaling(Step):
    """Surrounds the backwards of the run's thread, and the steps of its optimizers."""

    name = "loss_scale"
    needs = "trained"

    @override
    def begin(self) -> None:
        self._scale = LossScale()
        self._optimizers: Any = WeakIdKeyDictionary()
        self._scaling = False

    @property
    @override
    def enabled(self) -> bool:
        return self.options.kind.scaled

    @override
    def apply(self, parts: TrainingObjects) -> str:
        for model in parts.models:
            self.interceptors.for_model(model, self.name)
        if not self._scaling:
            self._scaling = True
            self.undoing.enter_context(self._scale.scaling())
            self.undoing.enter_context(flattened_states_complete())
        for optimizer in parts.optimizers:
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = True
                self._take(optimizer)
        return f"gradients × {self._scale.value:,.0f} inside of backward; a step that overflows is skipped"

    @override
    def undo(self) -> None:
        """Undo, and say that there is a scale in an error about gradients that ends the run."""
        error = sys.exc_info()[1]
        if self._scaling and isinstance(error, RuntimeError) and _ABOUT_OVERFLOW.search(str(error)):
            got = f"The loss scale of precision=16 was {self._scale.value:,.0f} at last"
            expected = "gradients overflow by it now and then, and the step after that is skipped"
            hint = "Leave anomaly mode and error_if_nonfinite=True out, or pass precision='bf16', which has no scale"
            note(error, error_message(got, expected, hint))
        super().undo()

    @override
    def final_result(self) -> StepResult | None:
        if not self._scale.skipped:
            return None
        steps = "1 step was" if self._scale.skipped == 1 else f"{self._scale.skipped:,} steps were"
        now = f"{steps} skipped; the scale is {self._scale.value:,.0f} now"
        return StepResult(self.name, "applied", now)

    def _take(self, optimizer: Optimizer) -> None:
        """Keep the scale in the checkpoints of an optimizer, and continue from the scale that it has."""
        self._continue(_pop(optimizer) or _last.pop(optimizer, None))
        self.undoing.callback(weakly(self._keep, optimizer))
        for handle in (
            optimizer.register_state_dict_post_hook(self._into_state_dict),
            optimizer.register_load_state_dict_post_hook(lambda loaded: self._continue(_pop(loaded))),
        ):
            self.undoing.callback(handle.remove)

    def _keep(self, optimizer: Optimizer) -> None:
        _last[optimizer] = self._state()

    def _state(self) -> tuple[float, int]:
        return self._scale.value, self._scale.good

    def _continue(self, state: tuple[float, int] | None) -> None:
        if state is not None:
            self._scale.value, self._scale.good = state

    def _into_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return with_entries(state_dict, dict(zip(SCALE, self._state(), strict=True)))


# The scale at the end of an optimizer's last run: a function that is called once an epoch continues with it.
_last: WeakKeyDictionary[Optimizer, tuple[float, int]] = WeakKeyDictionary()


def _pop(optimizer: Optimizer) -> tuple[float, int] | None:
    """Take the scale out of the groups of an optimizer, in which a checkpoint has left it."""
    scale, good = (pop_entry(optimizer, key) for key in SCALE)
    return (float(scale), int(good or 0)) if scale else None
