"""Compares the first batch of a run with the plain model, in fp32 and in fp64, on copies."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Container
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import ALONE, Ranks
from nano_loop.errors import NanoConfigError, NanoWarning, problem
from nano_loop.intercept.calls import Call, Entries, is_forward
from nano_loop.intercept.nested import find, map_tensors
from nano_loop.options import Options
from nano_loop.parts import Parts, class_name
from nano_loop.precision.traces import copied
from nano_loop.precision.verification import Acceleration, Verification, verified
from nano_loop.report import StepResult
from nano_loop.steps.step import Step

#: How many calls into a model are compared: the last ones before a step of the optimizer.
_MOST_CALLS = 8


class Verify(Step):
    """Notes the calls into each model, and compares them before the first step of an optimizer that they lead to.

    The loss is the loop's own and cannot be computed again. So copies of the model run backwards from its outputs, each
    with the gradient that reaches them in the loop. Rank 0 compares for all ranks.

    Attributes
    ----------
    acceleration : callable
        Takes a copy of a model, and accelerates it as the run does. The run sets it.
    """

    name = "verify"
    needs = "trained"

    acceleration: Acceleration

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        super().__init__(config, machine, entries, ranks)
        self._noted: dict[int, _Noted] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._found: dict[str, Verification] = {}

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        return None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        for model in parts.models if self.ranks.rank == 0 else ():
            if id(model) not in self._noted:
                self._noted[id(model)] = noted = _Noted(model, self.config.kind.parameters is not None)
                self.entries.add(model, self.name, noted.layer)
        for optimizer in parts.optimizers if self.ranks.rank == 0 else ():
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = optimizer
                self.undoing.callback(optimizer.register_step_pre_hook(self._compare).remove)
        return "of the first batch"

    def closing(self) -> StepResult | None:
        """See `Step.closing`."""
        if not self._noted:
            return None
        if not self._found:
            return StepResult(self.name, "skipped", "no step of an optimizer has followed a call into a model")
        summaries = [f"{name}: {found.summary()}" for name, found in self._found.items()]
        return StepResult(self.name, "measured", "; ".join(summaries), _Findings(self._found))

    def undo(self) -> None:
        """See `Step.undo`."""
        super().undo()
        self._noted.clear()
        self._optimizers.clear()

    def _compare(self, *_: object) -> None:
        for noted in self._noted.values():
            if noted.is_ready:
                self._compare_calls(noted)

    def _compare_calls(self, noted: _Noted) -> None:
        name = class_name(noted.model)
        model, calls = noted.take()
        try:
            found = verified(model, _loss_of, calls, self.config.kind, self.acceleration)
        except Exception as error:  # the model's own code, which may not run in fp64: the training goes on
            given = f"verify of {name} raised {type(error).__name__}: {error}"
            needed = "copies of the model have to run in fp32 and in fp64"
            warnings.warn(problem(given, needed, "Leave verify out for this model"), NanoWarning, stacklevel=2)
            return
        self._found[_another(name, self._found)] = found
        if not found.ok:
            given = f"{found.fault} of {name} is off by more than rounding"
            needed = "an accelerated model computes what the plain one does"
            advice = "See the table: print(report['verify'].data). Leave options out to find the one that it comes from"
            warnings.warn(problem(given, needed, advice), NanoWarning, stacklevel=2)


def _another(name: str, known: Container[str]) -> str:
    """Return a name that is not known: the name itself, or with a number."""
    numbered = (f"{name} {number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in known)


class _Findings(dict[str, Verification]):
    """What was found for each model, by the name of its class."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {name: found.as_dict() for name, found in self.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {found}" for name, found in self.items())


class _Noted:
    """The calls into a model until they have led to gradients, and a copy of the model as it was before the first."""

    def __init__(self, model: nn.Module, is_converted: bool) -> None:
        self.model = model
        self._is_converted = is_converted
        self._copy: nn.Module | None = None
        self._calls: deque[_NotedCall] = deque(maxlen=_MOST_CALLS)
        self._is_over = False

    @property
    def is_ready(self) -> bool:
        """Whether a gradient has reached the outputs of a call."""
        return not self._is_over and any(call.gradients for call in self._calls)

    def layer(self, call: Call) -> Call:
        """Note the calls that may lead to gradients."""

        def noting(function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_over or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return call(function, module, *args, **kwargs)
            noted = self._begin(function, module, args, kwargs)
            outputs = call(function, module, *args, **kwargs)
            if noted is not None:
                noted.watch(outputs)
            return outputs

        return noting

    def take(self) -> tuple[nn.Module, list[tuple[Any, ...]]]:
        """Return the copy of the model and the calls with gradients, and note no more."""
        model, calls = self._copy, [call.as_tuple() for call in self._calls if call.gradients]
        assert model is not None
        self._end()
        return model, calls

    def _end(self) -> None:
        self._is_over, self._copy = True, None
        self._calls.clear()

    def _begin(self, function: Call, module: nn.Module, args: Any, kwargs: Any) -> _NotedCall | None:
        if self._copy is None:
            try:
                self._copy = copied(self.model)
            except NanoConfigError as error:
                self._end()
                warnings.warn(str(error), NanoWarning, stacklevel=2)
                return None
            if self._is_converted:
                self._copy.float()
        path = next((name for name, each in self.model.named_modules() if each is module), None)
        if path is None:  # a module that has been replaced in the model
            return None
        method = "__call__" if is_forward(function) else function.__name__
        self._calls.append(_NotedCall(path, method, *map_tensors(_kept, (args, kwargs))))
        return self._calls[-1]


class _NotedCall:
    """A call into a model, with copies of its arguments, and the gradients that have reached its outputs."""

    def __init__(self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = path, method, args, kwargs
        self.gradients: dict[int, Tensor] = {}  # by the place of an output

    def watch(self, outputs: Any) -> None:
        """Note the gradients of the outputs."""
        for place, output in enumerate(_differentiable(outputs)):
            output.register_hook(partial(self._add, place))  # type: ignore[no-untyped-call]

    def _add(self, place: int, gradient: Tensor) -> None:
        before = self.gradients.get(place)
        self.gradients[place] = gradient.detach().clone() if before is None else before + gradient.detach()

    def as_tuple(self) -> tuple[Any, ...]:
        """Return the call and the gradients as `_loss_of` takes them."""
        return (*self._call, self.gradients)


def _loss_of(model: nn.Module, calls: Any) -> Tensor:
    """Return the outputs' mean square, with the gradients of the loop at the outputs."""
    total, squares = torch.zeros(()), torch.zeros(())
    for path, method, args, kwargs, gradients in calls:
        outputs = _differentiable(getattr(model.get_submodule(path), method)(*args, **kwargs))
        for place, gradient in gradients.items():
            total = total + (outputs[place] * gradient).sum()
            squares = squares + outputs[place].detach().square().mean()
    return total + (squares - total).detach()


def _differentiable(outputs: Any) -> list[Tensor]:
    return [each for each in find(Tensor, outputs) if each.requires_grad]


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
