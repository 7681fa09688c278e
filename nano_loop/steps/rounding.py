"""Lets optimizers of bf16 parameters compute in fp32, and rounds the new parameters stochastically."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from nano_loop.patching.attributes import replaced
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.objects.optimizers import closure_of, held_by, with_closure
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private import below_torch_functions
from nano_loop.precision.autocast.conversion import convert_data
from nano_loop.precision.autocast.rounding import StochasticRounding
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step


class Rounding(Step):
    """Casts bf16 parameters and their gradients to fp32 for each optimizer step, and rounds the result.

    State that the optimizer makes is therefore fp32: bf16 cannot hold a running mean of squares with a decay of 0.999,
    whose updates are smaller than its last bit.
    """

    name = "rounding"
    needs = "trained"

    @override
    def begin(self) -> None:
        self._wide: Any = WeakIdKeyDictionary()  # by the optimizer, which they do not hold
        self._is_applied = False

    @property
    @override
    def enabled(self) -> bool:
        return self.options.kind.parameters is torch.bfloat16

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._is_applied:
            self._is_applied = True
            self.undoing.callback(self.clock.before(self._before_step))
            self.undoing.callback(self.clock.after(self._after_step))
        for optimizer in parts.optimizers:
            self._take(optimizer)
        for model in parts.models:
            self.interceptors.add(model, self.name, self._after_a_step_that_raised)
        names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in parts.optimizers))
        return f"{names or 'any optimizer'} in fp32, then bf16 by stochastic rounding; optimizer state fp32"

    def _take(self, optimizer: Optimizer) -> None:
        if optimizer not in self._wide:
            wide = self._wide[optimizer] = _Wide(self._seed())
            undone_with(optimizer, self.undoing).callback(wide.narrow)
            for handle in wide.hooks(optimizer):
                self.undoing.callback(handle.remove)
            self._surround_modes(optimizer, wide)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._take(optimizer)  # it may not have been set up, in several processes
        return self._wide[optimizer].before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._wide:
            self._wide[optimizer].narrow()

    def _surround_modes(self, optimizer: Optimizer, wide: _Wide) -> None:
        """Let the methods by which schedule-free optimizers exchange weights compute in fp32, too."""
        _wide_of[id(optimizer)] = wide
        undone_with(optimizer, self.undoing).callback(_wide_of.pop, id(optimizer))
        for name in _MODES:
            if callable(getattr(type(optimizer), name, None)):
                self.undoing.enter_context(replaced(type(optimizer), name, _in_fp32))

    def _after_a_step_that_raised(self, call: Call) -> Call:
        """Round what such a step has left in fp32, before the model is called again."""

        def rounded_first(function: Call, /, *args: Any, **kwargs: Any) -> Any:
            for wide in [*self._wide.values()]:
                wide.narrow()
            return call(function, *args, **kwargs)

        return rounded_first

    def _seed(self) -> int:
        """Return another seed for each optimizer of a program, on all ranks that of rank 0."""
        seed = next(_seeds)
        return int(self.ranks.broadcast(seed, 0)) if self.ranks.size > 1 else seed


_seeds = itertools.count()
_MODES = ("train", "eval")
_wide_of: dict[int, _Wide] = process_wide("wide weights, by optimizer", {})


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


class _Wide:
    """The parameters of an optimizer that are fp32 during its step."""

    def __init__(self, seed: int) -> None:
        self._rounding = StochasticRounding(seed)
        # With their data and gradients in bf16, and gradients in fp32. Views and other processes may share the data.
        self._parameters: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def hooks(self, optimizer: Optimizer) -> list[Any]:
        return [
            # Loading casts state to the dtype of the parameters.
            optimizer.register_load_state_dict_pre_hook(lambda loaded, _: self.widen(loaded, all_of_them=True)),
            optimizer.register_load_state_dict_post_hook(lambda *_: self.narrow()),
        ]

    def widen(self, optimizer: Optimizer, all_of_them: bool = False) -> None:
        """Cast the parameters that have gradients, and these, to fp32."""
        narrow = {
            id(parameter): parameter
            for parameter in held_by(optimizer)
            if parameter.dtype is torch.bfloat16 and (all_of_them or parameter.grad is not None)
        }
        parameters = [*narrow.values()]
        with below_torch_functions():  # the step may be in a `disable_casts` of the user's
            before = [(parameter.data, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            convert_data(parameters, lambda data: data.to(torch.float32))
            for parameter, (data, gradient) in zip(parameters, before, strict=True):
                in_fp32 = parameter.grad = None if gradient is None else gradient.to(torch.float32)
                self._parameters.append((parameter, data, gradient, in_fp32))

    def narrow(self) -> None:
        """Round them to bf16 again."""
        if not self._parameters:
            return
        self._rounding.renew()
        with below_torch_functions():
            kept = [parameter.grad is in_fp32 for parameter, *_, in_fp32 in self._parameters]
            for parameter, *_ in self._parameters:
                parameter.grad = None
            convert_data([parameter for parameter, *_ in self._parameters], self._rounding.round)
            for (parameter, data, gradient, _), is_kept in zip(self._parameters, kept, strict=True):
                parameter.data = data.copy_(parameter.data)
                parameter.grad = gradient if is_kept else None
        self._parameters.clear()

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast for a step, but not for its closure."""
        closure = closure_of(args, kwargs)
        if closure is None:
            self.widen(optimizer)
            return None

        def narrow_meanwhile() -> Any:
            self.narrow()
            loss = closure()
            self.widen(optimizer)
            return loss

        return with_closure(args, kwargs, narrow_meanwhile)
