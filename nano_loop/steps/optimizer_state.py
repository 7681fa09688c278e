"""Steps optimizers over bf16 weights that keep every update, and with moments in bf16: ``optimizer_state="bf16"``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.errors import NanoConfigError, error_message
from nano_loop.optimizers.split_steps import SplitSteps, why_not
from nano_loop.optimizers.torch_fused_steps import steps_fused
from nano_loop.patching.attributes import replaced
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with, weakly
from nano_loop.patching.patch_table import process_wide
from nano_loop.precision.autocast.wide_weights import WideWeights
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step

_BF16 = "bf16"


class OptimizerState(Step):
    """Steps SGD, Adam and AdamW in one pass over split weights, and other optimizers over fp32 weights meanwhile.

    See `nano_loop.optimizers.split`. bf16 alone would lose each update that is smaller than 1/512 of the weight. It
    cannot hold a running mean of squares with a decay of 0.999 either, unless that is rounded at random.
    """

    name = "optimizer_state"
    needs = "trained"

    @override
    def begin(self) -> None:
        self._wide: Any = WeakIdKeyDictionary()  # by the optimizer, which they do not hold
        self._is_applied = False

    @property
    @override
    def enabled(self) -> bool:
        return self._is_split or self._is_narrow

    @property
    def _is_split(self) -> bool:
        return self.options.kind.parameters is torch.bfloat16

    @property
    def _is_narrow(self) -> bool:
        return self.options.optimizer_state == _BF16

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._is_applied:
            self._is_applied = True
            self.undoing.callback(self.clock.before(self._before_step))
            self.undoing.callback(self.clock.after(self._after_step))
        for optimizer in parts.optimizers:
            self._take(optimizer)
        if self._is_split:
            for model in parts.models:
                self.interceptors.add(model, self.name, self._after_a_step_that_raised)
        weights = "bf16 weights with 16 bits beside them" if self._is_split else "weights unchanged"
        moments = f"moments in {_BF16 if self._is_narrow else 'fp32'}"
        reasons = filter(None, map(why_not, parts.optimizers))
        others = [f"{reason}: weights in fp32 meanwhile" for reason in dict.fromkeys(reasons)]
        return "; ".join([f"{weights}, {moments}", *others])

    def _take(self, optimizer: Optimizer) -> None:
        if optimizer in self._wide:
            return
        reason = why_not(optimizer)
        if reason is not None and self._is_narrow:
            raise self._error(optimizer, reason)
        moments = torch.bfloat16 if self._is_narrow else torch.float32
        weights = self.split_weights if self._is_split else None
        steps = None if reason else SplitSteps(weights, moments, len(self._wide))
        wide = WideWeights(weights, steps, self._error if self._is_narrow else None)
        wide.takes(optimizer)
        self._wide[optimizer] = wide
        undoing = undone_with(optimizer, self.undoing)
        undoing.callback(wide.narrow)
        for handle in wide.hooks(optimizer):
            self.undoing.callback(handle.remove)
        if steps is not None:
            undoing.callback(weakly(steps.restore, optimizer))
            undoing.enter_context(steps_fused(optimizer, steps))
        self._surround_modes(optimizer, wide)

    def _error(self, optimizer: Optimizer, reason: str) -> NanoConfigError:
        got = f"{self.options.as_written[self.name]} with {type(optimizer).__name__}"
        return NanoConfigError(error_message(got, reason, 'Omit optimizer_state: its default is "32"'))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._take(optimizer)  # it may not have been set up, in several processes
        return self._wide[optimizer].before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._wide:
            self._wide[optimizer].narrow()

    def _surround_modes(self, optimizer: Optimizer, wide: WideWeights) -> None:
        """Let the methods by which schedule-free optimizers exchange weights compute in fp32, too."""
        _wide_of[id(optimizer)] = wide
        undone_with(optimizer, self.undoing).callback(_wide_of.pop, id(optimizer))
        for name in _MODES:
            if callable(getattr(type(optimizer), name, None)):
                self.undoing.enter_context(replaced(type(optimizer), name, _in_fp32))

    def _after_a_step_that_raised(self, call: Call) -> Call:
        """Split what such a step has left in fp32, before the model is called again."""

        def split_first(function: Call, /, *args: Any, **kwargs: Any) -> Any:
            for wide in [*self._wide.values()]:
                wide.narrow()
            return call(function, *args, **kwargs)

        return split_first


_MODES = ("train", "eval")
_wide_of: dict[int, WideWeights] = process_wide("wide weights, by optimizer", {})


def _in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        wide = _wide_of.get(id(self))
        if wide is None:
            return original(self, *args, **kwargs)
        wide.widen(self, all_of_them=True)
        try:
            return original(self, *args, **kwargs)
        finally:
            wide.narrow()

    return call
