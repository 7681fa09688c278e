"""The ambient mode's record of a training: its run, which lasts as long as the models, and changes of values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import parameters_of
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.run import Run

#: The number of backwards within which a module must get a gradient, and of its parameters that are compared.
_CHANCES, _COPIED = 8, 16


class Training:
    """A run, inside `outer` if any, for models that are trained together, until all objects that it holds are freed."""

    def __init__(self, outer: Run | None) -> None:
        self._run = None if outer is None else outer.inner()
        self._owners: list[weakref.finalize[..., Any]] = []
        self.models: Any = WeakIdKeyDictionary()
        self.has_ended = False

    def hold(self, owner: nn.Module | Optimizer) -> None:
        """Keep the run alive at least as long as `owner`."""
        finalizer = weakref.finalize(owner, self._release)
        finalizer.atexit = False
        self._owners.append(finalizer)

    def apply(self, parts: TrainingObjects, result: StepResult) -> None:
        """Set up objects, and add an entry for them to the report."""
        if self._run is None:
            return
        try:
            self._run.apply(parts, [result])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Undo the setup."""
        self.has_ended = True
        for finalizer in self._owners:
            finalizer.detach()
        if self._run is not None:
            self._run.__exit__(None, None, None)

    def _release(self) -> None:
        if not any(finalizer.alive for finalizer in self._owners):
            self.end()


class ChangedValues:
    """Modules, kept weakly, whose values may change after a backward, also through ``.data``: something trains them."""

    def __init__(self) -> None:
        self._left: Any = WeakIdKeyDictionary()  # the remaining number of backwards for a module to be reached
        self._copies: Any = WeakIdKeyDictionary()  # by modules that a backward has reached

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a backward has reached a module, so that its values must be compared."""
        return bool(self._copies) and module in self._copies

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward may still reach a module."""
        return bool(self._left)

    def add(self, module: nn.Module) -> None:
        """Watch a module."""
        self._left.setdefault(module, _CHANCES)

    def note_backward(self) -> None:
        """Copy the smallest parameters of the modules that a backward has reached."""
        for module, left in [*self._left.items()]:
            reached = [parameter for parameter in parameters_of(module) if _has_plain_gradient(parameter)]
            if reached or not left:
                del self._left[module]
            else:
                self._left[module] = left - 1
            if reached:
                smallest = sorted(reached, key=torch.Tensor.numel)[:_COPIED]
                self._copies[module] = [(parameter, parameter.detach().clone()) for parameter in smallest]

    def have_changed(self, module: nn.Module) -> bool:
        """Whether parameters of a module differ from their copies, which are dropped."""
        copies = self._copies.pop(module, [])
        return any(not torch.equal(parameter.detach().to(copy.dtype), copy) for parameter, copy in copies)


def _has_plain_gradient(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided and parameter.is_cpu
    return is_plain and parameter.grad is not None
