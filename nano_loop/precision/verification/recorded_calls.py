"""Records a loop's calls into a model, and repeats them on copies with the gradients that reached their outputs."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nano_loop.patching.calls.calls import Call, is_forward
from nano_loop.patching.torch_private import in_functorch
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.walk import find
from nano_loop.precision.verification.traces import converted, copied
from nano_loop.runtime.objects.training_objects import class_name

#: Why a model without gradients is not compared.
NO_GRADIENT = "no step of an optimizer has followed a backward from an output of a model"

#: Maximum number of recorded calls: the last ones before a step of the optimizer.
_MOST_CALLS = 8
#: Recording stops after this many steps without a gradient.
_MOST_STEPS = 10

_T = TypeVar("_T")


class RecordedCalls:
    """The calls into a model until they lead to gradients, and a copy of the model from before the first call.

    The copy is fp32, also if parameters are converted in the run. `on_failure` gets the reason if it cannot be
    compared.
    """

    def __init__(
        self, model: nn.Module, is_converted: bool, on_failure: Callable[[str], object] = lambda reason: None
    ) -> None:
        self._on_failure = on_failure
        self.model = weakref.ref(model)
        #: The name of its class.
        self.name = class_name(model)
        #: Why the model is not compared, or an empty string.
        self.reason = ""
        self._is_converted = is_converted
        self._copy: nn.Module | None = None
        self._calls: deque[_NotedCall] = deque(maxlen=_MOST_CALLS)
        self._is_over = False
        self._missed = 0

    @property
    def is_ready(self) -> bool:
        """Whether a gradient has reached an output of a call."""
        return not self._is_over and any(call.gradients for call in self._calls)

    def layer(self, call: Call) -> Call:
        """Wrap a call to record it if it may lead to gradients."""

        def noting(function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_over or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return call(function, module, *args, **kwargs)
            if in_backward() or in_functorch():  # recomputed by a checkpoint, or in a function transform
                return call(function, module, *args, **kwargs)
            recorded = self.guarded(self._begin, function, module, args, kwargs)
            outputs = call(function, module, *args, **kwargs)
            if recorded is not None:
                self.guarded(recorded.watch, outputs)
            return outputs

        return noting

    def guarded(self, function: Callable[..., _T], *args: Any) -> _T | None:
        """Call a function, and stop recording if it raises. Training continues."""
        try:
            return function(*args)
        except Exception as error:  # the model's code may not support fp64 or copies
            self.reason = f"a copy of {self.name} raised {type(error).__name__}: {error}"
            self.end()
            self._on_failure(self.reason)
            return None

    def take(self) -> tuple[nn.Module, list[tuple[Any, ...]]]:
        """Stop recording, and return the copy of the model and the calls with gradients."""
        model, calls = self._copy, [call.as_tuple() for call in self._calls if call.gradients]
        assert model is not None
        self.end()
        return model, calls

    def miss(self) -> None:
        """Count an optimizer step that was not preceded by a gradient of an output."""
        self._missed += bool(self._calls)
        if self._missed > _MOST_STEPS and not self._is_over:
            self.reason = NO_GRADIENT
            self.end()

    def end(self) -> None:
        """Stop recording, and drop all records."""
        self._is_over, self._copy = True, None
        for call in self._calls:
            call.close()
        self._calls.clear()

    def _begin(self, function: Call, module: nn.Module, args: Any, kwargs: Any) -> _NotedCall | None:
        model = self.model()
        named = () if model is None else model.named_modules()
        path = next((name for name, submodule in named if submodule is module), None)
        if model is None or path is None:  # the module was replaced in the model
            return None
        if self._copy is None:
            self._copy = copied(model)
            if self._is_converted:
                converted(self._copy, torch.float32)
        method = "__call__" if is_forward(function) else function.__name__
        if len(self._calls) == _MOST_CALLS:
            self._calls[0].close()
        self._calls.append(_NotedCall(path, method, *_copy_of((args, kwargs))))
        return self._calls[-1]


class _NotedCall:
    """A call into a model, with copies of its arguments, and the gradients that have reached its outputs."""

    def __init__(self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = path, method, args, kwargs
        self._hooks: list[Any] = []
        self.gradients: dict[int, Tensor] = {}  # by position of the output

    def watch(self, outputs: Any) -> None:
        """Record the gradients of the outputs."""
        for place, output in enumerate(_differentiable(outputs)):
            self._hooks.append(output.register_hook(partial(self._add, place)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop recording gradients."""
        for hook in self._hooks:
            hook.remove()

    def _add(self, place: int, gradient: Tensor) -> None:
        before = self.gradients.get(place)
        self.gradients[place] = gradient.detach().clone() if before is None else before + gradient.detach()

    def as_tuple(self) -> tuple[Any, ...]:
        """Return the call and its gradients in the format of `loss_of`."""
        return (*self._call, self.gradients)


def loss_of(model: nn.Module, calls: Any) -> Tensor:
    """Return the mean square of a copy's outputs in calls, whose backward passes the loop's gradients to them."""
    total, squares = torch.zeros(()), torch.zeros(())
    for path, method, args, kwargs, gradients in calls:
        args, kwargs = _copy_of((args, kwargs))  # a model may write into a list, or into a tensor
        outputs = _differentiable(getattr(model.get_submodule(path), method)(*args, **kwargs))
        for place, gradient in gradients.items():
            total = total + (outputs[place] * gradient).sum()
            squares = squares + outputs[place].detach().square().mean()
    return total + (squares - total).detach()


def _differentiable(outputs: Any) -> list[Tensor]:
    """Return the tensors that a model has computed, excluding parameters that it returns."""
    return [tensor for tensor in find(Tensor, outputs) if tensor.requires_grad and not tensor.is_leaf]


def _copy_of(value: Any) -> Any:
    """Return a copy of the arguments of a call in which tensors are leaves."""
    return copy.deepcopy(value, {id(tensor): _kept(tensor) for tensor in find(Tensor, value)})


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
