"""The optimizers that step during a run: whether they were set up, and whether the options then apply to anything."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.active_runs import innermost
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.patching.members import parameters_of
from nano_loop.patching.objects.optimizers import closure_of, trained_by
from nano_loop.patching.user_code import warn
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects

_NOTHING = "nothing was set up in this run, so nothing is accelerated"
_SEPARATE = "nothing was set up in this run, so every rank trains by itself, and only rank 0's model is kept"


class SteppedOptimizers:
    """Looks at the first step of each optimizer in the thread of a run.

    Parameters
    ----------
    ranks : Ranks
        The processes of the run.
    hint : str
        What sets objects up.
    unmet : callable
        Returns the options that were asked for by True and apply to nothing that was set up, with the reasons. Called
        at the first step of the run.
    undoing : contextlib.ExitStack
        Takes the hook away when it is closed.
    """

    def __init__(
        self, ranks: Ranks, hint: str, unmet: Callable[[], Sequence[tuple[str, str]]], undoing: ExitStack
    ) -> None:
        self._ranks, self._hint, self._unmet = ranks, hint, unmet
        self._place = os.getpid(), threading.get_ident()
        self._is_set_up = False  # whether anything is
        self._models: list[weakref.ref[nn.Module]] = []
        self._set_up: set[int] = set()  # the ids of optimizers, like the next two
        self._stepped: set[int] = set()
        self._idle: dict[int, str] = {}  # that have stepped without gradients, with the line of the report
        self._remarks: dict[str, None] = {}
        undoing.callback(self._close, register_optimizer_step_pre_hook(self._before_step))

    def add(self, parts: TrainingObjects) -> None:
        """Note what one `setup` has set up."""
        self._is_set_up = True
        self._models += map(weakref.ref, parts.models)
        self._set_up.update(map(id, parts.optimizers))

    def final_result(self) -> StepResult | None:
        """Return a line about optimizers that were not set up, or do not train what was set up, or None."""
        idle = [line for key, line in self._idle.items() if key not in self._stepped]
        detail = "; ".join(dict.fromkeys([*self._remarks, *idle]))
        return StepResult("fused_optimizer", "skipped", detail, code="not_set_up") if detail else None

    def _close(self, hook: RemovableHandle) -> None:
        hook.remove()
        del self._unmet  # the run's, which holds this object: a cycle would keep its models until a collection

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepped or not self._is_of_run():
            return
        name, trained = type(optimizer).__name__, trained_by(optimizer)
        has_closure = closure_of(args, kwargs) is not None
        if not trained and not has_closure:
            self._idle[id(optimizer)] = f"{name} has stepped without gradients"
            return
        if not self._stepped:
            self._check(name)
        self._stepped.add(id(optimizer))
        if id(optimizer) not in self._set_up:
            self._remarks[f"{name} was not set up"] = None
        elif self._models and not has_closure and self._parameters().isdisjoint(map(id, trained)):
            self._remarks[f"{name} trains no model that was set up"] = None

    def _parameters(self) -> set[int]:
        """Return the ids of the parameters of the models that were set up."""
        models = [model for reference in self._models if (model := reference()) is not None]
        return {id(parameter) for model in models for parameter in parameters_of(model)}

    def _is_of_run(self) -> bool:
        return self._place == (os.getpid(), threading.get_ident()) and innermost() is self._ranks

    def _check(self, name: str) -> None:
        """Warn or raise at the first step of the run where nothing was set up, or an option applies to nothing."""
        unmet = self._unmet()
        if self._is_set_up:
            messages = [error_message(f"{option}=True", reason, f"Leave {option} out") for option, reason in unmet]
            if messages:
                raise NanoConfigError("\n".join(messages))
            return
        got = " with ".join([f"{name} steps", *(f"{option}=True" for option, _ in unmet)])
        if self._ranks.size > 1:
            raise NanoError(error_message(got, _SEPARATE, self._hint))
        warn(error_message(got, _NOTHING, self._hint))
