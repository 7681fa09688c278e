"""Scales the learning rate with the number of ranks, inside ``optimizer.step()`` only.

With N ranks, each step uses a batch N times as large. The usual rule is a learning rate N times as large, with a
warm-up from the unscaled rate. In BigDL-Nano this is ``auto_lr``.
"""

from __future__ import annotations

from typing import Any

from torch.optim import LBFGS, Optimizer

from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import ALONE, Ranks
from nano_loop.intercept.calls import Entries
from nano_loop.intercept.optimizers import Closure, closure_of, with_closure
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.steps.step import RanksStep

#: Number of steps over which the ratio grows from 1 to the number of ranks.
WARM_UP = 1000
#: The key in the first parameter group of a checkpoint that holds the number of steps taken.
KEY = "auto_lr_step"


class LearningRate(RanksStep):
    """Scales the user's ``lr`` at step t, from 0, to ``lr · (1 + (N - 1) · min(t / 1000, 1))``, with N ranks."""

    name = "learning_rate"
    needs = "optimizers"

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        super().__init__(config, machine, entries, ranks)
        self._ramps: dict[int, _Ramp] = {}  # by the optimizer's id; each keeps its optimizer alive

    @property
    def asked(self) -> bool:
        """See `Step.asked`."""
        return super().asked and self.config.auto_lr

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        return _SEARCHES if all(isinstance(each, LBFGS) for each in parts.optimizers) else None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        for optimizer in parts.optimizers:
            if id(optimizer) not in self._ramps and not isinstance(optimizer, LBFGS):
                self._ramps[id(optimizer)] = _Ramp(optimizer, self.ranks.size)
                self._start(self._ramps[id(optimizer)])
        left = f"; {_SEARCHES}" if any(isinstance(each, LBFGS) for each in parts.optimizers) else ""
        return f"ramps to {self.ranks.size}× over {WARM_UP:,} steps (auto_lr){left}"

    def undo(self) -> None:
        """See `Step.undo`."""
        super().undo()
        self._ramps.clear()

    def _start(self, ramp: _Ramp) -> None:
        optimizer = ramp.optimizer
        self.undoing.callback(ramp.put_back)
        for handle in (
            optimizer.register_step_pre_hook(ramp.before_step),
            optimizer.register_step_post_hook(ramp.after_step),
            optimizer.register_state_dict_pre_hook(ramp.before_state_dict),
            optimizer.register_state_dict_post_hook(ramp.into_state_dict),
            optimizer.register_load_state_dict_post_hook(ramp.after_load),
        ):
            self.undoing.callback(handle.remove)


_SEARCHES = "LBFGS searches its own step length"


class _Ramp:
    """The scaled learning rates of one optimizer."""

    def __init__(self, optimizer: Optimizer, size: int) -> None:
        self.optimizer = optimizer
        self._size = size
        self._step = 0
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # a group, the user's learning rate, ours

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Scale the learning rate; the user's closure runs with the unscaled one."""
        self.put_back()  # a previous step may have raised
        self._scale()
        closure = closure_of(args, kwargs)
        return None if closure is None else with_closure(args, kwargs, lambda: self._unscaled(closure))

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.put_back()
        self._step += 1

    def before_state_dict(self, optimizer: Optimizer) -> None:
        self.put_back()

    def into_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state_dict` with the step in the first group."""
        first, *others = state_dict["param_groups"]
        return {**state_dict, "param_groups": [{**first, KEY: self._step}, *others]}

    def after_load(self, optimizer: Optimizer) -> None:
        """Continue from the checkpoint's step, or from 0 if it has none."""
        self._scaled.clear()  # these groups were replaced
        steps = [group.pop(KEY) for group in optimizer.param_groups if KEY in group]
        self._step = int(steps[0]) if steps else 0

    def put_back(self) -> None:
        """Restore the user's learning rate in every group, unless it was changed in the meantime."""
        for group, users, ours in self._scaled:
            if group.get("lr") is ours:
                group["lr"] = users
        self._scaled.clear()

    def _scale(self) -> None:
        ratio = 1 + (self._size - 1) * min(self._step / WARM_UP, 1)
        if ratio == 1:
            return
        for group in self.optimizer.param_groups:
            if group.get("lr") is not None:
                users = group["lr"]
                group["lr"] = users * ratio  # out of place, also where it is a tensor
                self._scaled.append((group, users, group["lr"]))

    def _unscaled(self, closure: Closure) -> Any:
        self.put_back()
        loss = closure()
        self._scale()
        return loss
