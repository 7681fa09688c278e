"""The optimizers that step during a run: whether they were set up, and whether the options apply to anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.active_runs import RunScope
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import parameters_of
from nano_loop.patching.optimizers import called_before_steps, closure_of, held_by, trained_by
from nano_loop.patching.user_code import warn
from nano_loop.runtime.clock import StepClock
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects

_NOTHING = "no model or optimizer was set up, so nothing is accelerated"
_SEPARATE = "no model or optimizer was set up, so every rank trains a separate model, and only rank 0's model is kept"


class SteppedOptimizers:
    """Watches the first step of each optimizer in the scope of a run.

    In one process, this sets up an optimizer that trains a set-up model but was not set up. In several, the clock
    counts its steps, since other ranks may not step it. `unmet` returns the options set to True that apply to nothing.
    """

    def __init__(
        self,
        ranks: Ranks,
        scope: RunScope,
        hint: str,
        apply: Callable[[TrainingObjects], None],
        unmet: Callable[[], Iterable[tuple[str, str, str]]],
        clock: StepClock,
    ) -> None:
        #: In the ambient mode, sets up an optimizer without a set-up model. Returns False to be called again.
        self.take: Callable[[Optimizer], bool] | None = None
        self.saw_inner_run = False  # whether optimizers have stepped in a nested run
        self._ranks, self._scope, self._hint, self._apply, self._unmet = ranks, scope, hint, apply, unmet
        self._is_set_up = False  # True after the first setup
        self._models: Any = WeakIdKeyDictionary()
        self._optimizers: Any = WeakIdKeyDictionary()  # those that were set up
        self._clock = clock
        # Optimizers that were checked, by id, since each step looks this up, and weak dictionaries are slow.
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        self._idle: dict[int, str] = {}  # report lines by id, for those that have stepped without gradients
        self._remarks: dict[str, None] = {}
        self._is_first = True

    def add(self, parts: TrainingObjects) -> None:
        """Record the objects of a `setup`."""
        self._is_set_up = True
        for model in parts.models:
            self._models[model] = None
        for optimizer in parts.optimizers:
            self._optimizers[optimizer] = None

    def forget(self) -> None:
        """Treat the next step of each optimizer as its first."""
        self._stepped.clear()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Watch steps until the end of the body."""
        try:
            with called_before_steps(self._before_step):
                yield
        finally:
            del self._unmet, self._apply  # the run holds this object: a reference cycle would keep its models alive
            self.take = None

    def final_result(self) -> StepResult | None:
        """Return a line about optimizers that were not set up or stepped without gradients, or None."""
        detail = "; ".join(dict.fromkeys([*self._remarks, *self._idle.values()]))
        return StepResult("fused_optimizer", "skipped", detail, code="not_set_up") if detail else None

    def trains_set_up_model(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was set up, or is set up now because it holds parameters of a set-up model."""
        if optimizer in self._optimizers:
            return True
        if self._parameters().isdisjoint(map(id, held_by(optimizer))):
            return False
        self._apply(TrainingObjects(optimizers=[optimizer]))
        self._optimizers[optimizer] = None  # also wrappers whose inner optimizers were set up
        return True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        known = self._stepped.get(id(optimizer))
        if known is not None and known() is optimizer:
            return
        if not self._scope.is_here():
            self.saw_inner_run = True
            return
        name, trained = type(optimizer).__name__, trained_by(optimizer)
        has_closure = closure_of(args, kwargs) is not None
        if not trained and not has_closure:
            self._idle[id(optimizer)] = f"{name} has stepped without gradients"
            return
        self._idle.pop(id(optimizer), None)
        # Other ranks may not step an optimizer that this one does.
        if self._ranks.size == 1 and not self.trains_set_up_model(optimizer) and self.take is not None:
            if self.take(optimizer):
                self._stepped[id(optimizer)] = weakref.ref(optimizer)
            return
        if self._ranks.size > 1 and not self._parameters().isdisjoint(map(id, held_by(optimizer))):
            self._clock.add(TrainingObjects(optimizers=[optimizer]).optimizers)
        if self._is_first:
            self._check(name)
            self._is_first = False
        self._stepped[id(optimizer)] = weakref.ref(optimizer)
        parameters = held_by(optimizer) if has_closure else trained
        if self._models and self._parameters().isdisjoint(map(id, parameters)):
            got = f"{name} does not train a model that was set up"
            is_model = any(isinstance(weight, nn.Parameter) and weight.dim() > 1 for weight in parameters)
            if is_model and optimizer in self._optimizers and self._ranks.size == 1:  # with several, a step warns
                warn(error_message(got, "its training is not accelerated", f"{self._hint}, with that model"))
            else:
                self._remarks[got] = None
        elif optimizer not in self._optimizers:
            self._remarks[f"{name} was not set up"] = None

    def _parameters(self) -> set[int]:
        """Return the ids of the parameters of the models that were set up."""
        return {id(parameter) for model in [*self._models] for parameter in parameters_of(model)}

    def _check(self, name: str) -> None:
        """Warn or raise at the first step of the run if nothing was set up, or an option does not apply to anything."""
        unmet = [*self._unmet()]
        if self._is_set_up:
            messages = [error_message(f"{option}=True", reason, hint) for option, reason, hint in unmet]
            if messages:
                raise NanoConfigError("\n".join(messages))
            return
        got = " with ".join([f"the loop steps {name}", *(f"{option}=True" for option, *_ in unmet)])
        if self._ranks.size > 1:
            raise NanoError(error_message(got, _SEPARATE, self._hint))
        warn(error_message(got, _NOTHING, self._hint))
