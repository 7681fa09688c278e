"""The methods through which a loop can call the modules of a model."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from nano_loop.patching.attributes import defined_in, library

#: The method through which a loop calls modules.
MODULE_CALL: tuple[type, str] = nn.Module, "__call__"
# Modules of torch's classes are called through __call__. Replacing their methods as well would affect every model.
_NOT_THE_USERS = frozenset({"torch", "builtins", "typing", "abc", "collections"})
# Trainer base classes. A method that overrides one of theirs is a hook for the trainer, not a computation.
_TRAINERS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"})
_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


def called_by_loops(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model`, except parametrizations, which are called by accesses to `layer.weight`."""
    modules = list(model.modules())
    lists = [module for module in modules if isinstance(module, ParametrizationList)]
    parametrizations = {part for parametrization_list in lists for part in parametrization_list.modules()}
    return [module for module in modules if module not in parametrizations]


def entry_points(modules: list[nn.Module]) -> set[tuple[type, str]]:
    """Return the class attributes through which the loop can call any of `modules`."""
    methods = {MODULE_CALL}
    for kind in {type(module) for module in modules}:
        hooks = [nn.Module, *(base for base in kind.__mro__ if library(base) in _TRAINERS)]
        for owner in kind.__mro__:
            if library(owner) not in _NOT_THE_USERS | _TRAINERS:
                methods |= {(owner, name) for name, value in defined_in(owner).items() if _computes(name, value, hooks)}
    return methods


def _computes(name: str, value: object, hooks: list[type]) -> bool:
    """Whether a class attribute is a method that the loop may call for a computation."""
    lazy = inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value)
    if lazy or not inspect.isfunction(value):
        return False
    if name in _STEPS or name in ("forward", "__call__"):
        return True
    return not (name.startswith("_") or any(hasattr(base, name) for base in hooks))
