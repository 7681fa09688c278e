"""Scales the learning rate with the number of ranks, inside ``optimizer.step()`` only.

With N ranks, each step uses a batch N times as large. The usual rule is a learning rate N times as large, with a
warm-up from the unscaled rate. In BigDL-Nano this is ``auto_lr``.

The warm-up belongs to the optimizer: a function that is called once per epoch continues it at each call. It pauses
while all ranks compute the same, since then the batch is not larger.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.patching.members import parameters_of
from nano_loop.patching.optimizers import Closure, closure_of, held_by, with_closure
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import RanksStep, SkipReason

#: Number of steps over which the ratio grows from 1 to the number of ranks.
WARM_UP = 1000
#: The number of ramp steps in a checkpoint's first parameter group. Live parameter groups never have this entry.
RAMP = "auto_lr_step"


class LearningRate(RanksStep):
    """Scales the user's ``lr`` at step t, from 0, to ``lr · (1 + (N - 1) · min(t / 1000, 1))``, with N ranks."""

    name = "learning_rate"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._ramps: dict[int, _Ramp] = {}  # by optimizer id; each keeps its optimizer alive
        self._ddp: dict[int, nn.Parameter] = {}  # the parameters of the user's own DDP models, by id

    @property
    @override
    def enabled(self) -> bool:
        return super().enabled and self.options.auto_lr

    @override
    def observe(self, parts: TrainingObjects) -> None:
        models = [model for model in parts.models if isinstance(model, DistributedDataParallel)]
        self._ddp |= {id(parameter): parameter for model in models for parameter in parameters_of(model)}

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self.ranks.context.split is not None:
            return SkipReason("split_batches", "auto_lr has no effect: split batches are the same as with one process")
        return SkipReason.of_all([self._refusal(optimizer) for optimizer in parts.optimizers])

    @override
    def apply(self, parts: TrainingObjects) -> str:
        refusals = {id(optimizer): self._refusal(optimizer) for optimizer in parts.optimizers}
        new = [
            optimizer
            for optimizer in parts.optimizers
            if not refusals[id(optimizer)] and id(optimizer) not in self._ramps
        ]
        taken = self.ranks.broadcast([_pop_steps_taken(optimizer) for optimizer in new])
        if not self._ramps:
            self.undoing.callback(self.clock.before(self._before_step))
            self.undoing.callback(self.clock.after(self._after_step))
        for optimizer, step in zip(new, taken, strict=True):
            self._ramps[id(optimizer)] = _Ramp(optimizer, self.ranks, step)
            self._start(self._ramps[id(optimizer)])
        ramps = f"ramps to {self.ranks.size}× over {WARM_UP:,} steps (auto_lr)"
        return "; ".join(dict.fromkeys([ramps, *(refusal.detail for refusal in refusals.values() if refusal)]))

    def _refusal(self, optimizer: Optimizer) -> SkipReason | None:
        if isinstance(optimizer, LBFGS):
            return SkipReason("lbfgs", "LBFGS searches its own step length")
        held = set(map(id, held_by(optimizer)))
        if held and self._ddp.keys() >= held:
            return SkipReason("users_ddp", "the model is your own DistributedDataParallel, so the rate is left to you")
        return None

    @override
    def final_result(self) -> StepResult | None:
        if not self._ramps or not self.ranks.context.sharding.undivided:
            return None
        detail = "stays at 1×, since all ranks have computed the same"
        return StepResult(self.name, "skipped", detail, code="same_batches")

    def _start(self, ramp: _Ramp) -> None:
        optimizer = ramp.optimizer
        self.undoing.callback(ramp.keep_progress)
        self.undoing.callback(ramp.put_back)
        for handle in (
            optimizer.register_state_dict_pre_hook(lambda _: ramp.put_back()),
            optimizer.register_state_dict_post_hook(ramp.into_state_dict),
            optimizer.register_load_state_dict_post_hook(ramp.after_load),
        ):
            self.undoing.callback(handle.remove)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        ramp = self._ramps.get(id(optimizer))
        return None if ramp is None else ramp.before_step(args, kwargs)

    def _after_step(self, optimizer: Optimizer) -> None:
        ramp = self._ramps.get(id(optimizer))
        if ramp is not None:
            ramp.after_step()


#: The groups of an optimizer at the end of its last run, and the step of its ramp.
_progress: WeakKeyDictionary[Optimizer, tuple[list[dict[str, Any]], int]] = WeakKeyDictionary()


def _pop_steps_taken(optimizer: Optimizer) -> int:
    """Return the step at which a ramp begins: a loaded checkpoint's, or the last run's unless one was loaded since."""
    saved = _pop_entry(optimizer)
    groups, step = _progress.pop(optimizer, (None, 0))
    if saved is not None:
        return int(saved)
    return step if groups is optimizer.param_groups else 0


def _pop_entry(optimizer: Optimizer) -> Any:
    """Remove and return the entry that a checkpoint has left in the groups of an optimizer, or None."""
    values = [group.pop(RAMP) for group in optimizer.param_groups if RAMP in group]
    return values[0] if values else None


class _Ramp:
    """The scaled learning rates of one optimizer."""

    def __init__(self, optimizer: Optimizer, ranks: Ranks, step: int) -> None:
        self.optimizer = optimizer
        self.step = step
        self._ranks = ranks
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # a group, the user's learning rate, ours

    def before_step(self, args: Any, kwargs: Any) -> Any:
        """Scale the learning rate; the user's closure runs with the unscaled one."""
        self.put_back()  # a previous step may have raised
        self._scale()
        closure = closure_of(args, kwargs)
        return None if closure is None else with_closure(args, kwargs, lambda: self._unscaled(closure))

    def after_step(self) -> None:
        self.put_back()
        if not self._ranks.context.sharding.undivided:
            self.step += 1

    def into_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state_dict` with the step in the first group."""
        first, *others = state_dict["param_groups"]
        return {**state_dict, "param_groups": [{**first, RAMP: self.step}, *others]}

    def after_load(self, optimizer: Optimizer) -> None:
        """Continue from the checkpoint's step, or from 0 if it has none."""
        self._scaled.clear()  # these groups were replaced
        self.step = int(_pop_entry(optimizer) or 0)

    def keep_progress(self) -> None:
        """Let the next run of the optimizer continue the ramp."""
        _progress[self.optimizer] = self.optimizer.param_groups, self.step

    def put_back(self) -> None:
        """Restore the user's learning rate in every group, unless it was changed in the meantime."""
        for group, users, ours in self._scaled:
            if group.get("lr") is ours:
                group["lr"] = users
        self._scaled.clear()

    def _scale(self) -> None:
        ratio = 1 + (self._ranks.size - 1) * min(self.step / WARM_UP, 1)
        if ratio == 1 or self._ranks.context.sharding.undivided:
            return
        for group in self.optimizer.param_groups:
            if group.get("lr") is not None:
                users = group["lr"]
                group["lr"] = users * ratio  # out of place, even if it is a tensor
                self._scaled.append((group, users, group["lr"]))

    def _unscaled(self, closure: Closure) -> Any:
        self.put_back()
        loss = closure()
        self._scale()
        return loss
