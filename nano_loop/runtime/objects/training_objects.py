"""The user's objects that one ``setup`` call passes to the steps, and checks of their kinds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.optimizers import innermost

_ITERATE = "Collect the yielded values in a list and return the list"
_AWAIT = "Write it without async, and await its inputs before the call"
_CALL = "Pass a function, or decorate the method that trains"
_BLOCK = "Decorate the function that trains it, or call that in a block of nano_loop.accelerated(model, optimizer)"
# Kinds of objects that cannot be a training loop, each with a check and the advice for its error.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a class": (inspect.isclass, _CALL),
    "a generator function": (inspect.isgeneratorfunction, _ITERATE),
    "an async function": (inspect.iscoroutinefunction, _AWAIT),
    "an async generator function": (inspect.isasyncgenfunction, _AWAIT),
    "a model": (lambda value: isinstance(value, nn.Module), _BLOCK),
}
#: The names by which users know torch's classes.
_NAMES = {nn.Module: "torch.nn.Module", Optimizer: "torch.optim.Optimizer", DataLoader: "torch.utils.data.DataLoader"}


def check_loop(function: Any, name: str) -> None:
    """Raise a `NanoConfigError` if `function` does not run to completion when it is called."""
    allowed = "a training loop must be a plain function or method that completes the training before it returns"
    for kind, (is_of_kind, advice) in _REFUSED.items():
        if is_of_kind(function) or is_of_kind(getattr(function, "__call__", None)):  # noqa: B004
            raise NanoConfigError(error_message(f"{name} is {kind}", allowed, advice))
    if not callable(function):
        raise NanoConfigError(error_message(f"{name} is a {type(function).__name__}", allowed, _CALL))


def check_kinds(*arguments: tuple[str, type, Sequence[Any]]) -> None:
    """Raise one `NanoConfigError` for all values of the wrong type, given names, types and values of arguments."""
    problems = []
    for name, kind, values in arguments:
        for value in values:
            if not isinstance(value, kind):
                got = f"{name} is a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")
                advice = "Pass model, optimizer, *dataloaders in this order, with several optimizers as one list"
                problems.append(error_message(got, f"it must be a {_NAMES.get(kind, kind.__qualname__)}", advice))
    if problems:
        raise NanoConfigError("\n".join(problems))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class. For a scripted module, return the name of the original class."""
    return str(module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__)


def class_names(modules: Iterable[nn.Module]) -> set[str]:
    """Return the names of the modules' classes and of their base classes: a program may name its layers anything."""
    modules = list(modules)
    bases = {base.__name__ for kind in {*map(type, modules)} for base in kind.__mro__}
    return bases.union(map(class_name, modules))


def has_modules(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a model has modules of these classes, or scripted ones."""
    names = {kind.__name__ for kind in kinds}
    return any(isinstance(module, kinds) or class_name(module) in names for module in model.modules())


@dataclass
class TrainingObjects:
    """The user's models, optimizers and loaders."""

    models: list[nn.Module] = field(default_factory=list)  # changed in place by the steps
    #: Changed in place. A wrapper of optimizers is replaced by its inner optimizers.
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)  # they keep their class and attributes
    #: Whether the batches are always or never sharded among the ranks. None: depends on the models' mode.
    shard: bool | None = None

    def __post_init__(self) -> None:
        """Replace wrappers of optimizers by the inner optimizers."""
        self.optimizers = innermost(self.optimizers)

    @classmethod
    def of(cls, model: Any, optimizer: Any, dataloaders: Sequence[Any]) -> TrainingObjects:
        """Return the objects of a call ``setup(model, optimizer, *dataloaders)``; the first two may be lists."""
        models, optimizers, loaders = _as_list(model), _as_list(optimizer), list(dataloaders)
        check_kinds(
            ("model", nn.Module, models), ("optimizer", Optimizer, optimizers), ("dataloaders", DataLoader, loaders)
        )
        return cls(models, optimizers, loaders)

    @property
    def trained(self) -> list[nn.Module | Optimizer]:
        """The models and optimizers."""
        return [*self.models, *self.optimizers]
