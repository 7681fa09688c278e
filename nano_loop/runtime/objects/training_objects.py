"""The user's objects that one ``setup`` call passes to the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.patching.members import parameters_of
from nano_loop.patching.optimizers import innermost
from nano_loop.runtime.objects.checks import check_kinds


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class. For a scripted module, return the name of the original class."""
    return str(module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__)


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
    #: Whether the batches are always (True) or never (False) sharded among the ranks. None: depends on the models'
    #: mode.
    shard: bool | None = None

    def __post_init__(self) -> None:
        """Replace wrappers of optimizers by the inner optimizers."""
        self.optimizers = innermost(self.optimizers)

    @classmethod
    def of(cls, model: Any, optimizer: Any, dataloaders: Sequence[Any]) -> TrainingObjects:
        """Return the objects of a call ``setup(model, optimizer, *dataloaders)``. The first two may be lists.

        Raises
        ------
        NanoConfigError
            If arguments have the wrong type. The message lists all of them.
        """
        models, optimizers, loaders = _as_list(model), _as_list(optimizer), list(dataloaders)
        check_kinds(
            ("model", nn.Module, models), ("optimizer", Optimizer, optimizers), ("dataloaders", DataLoader, loaders)
        )
        return cls(models, optimizers, loaders)

    @property
    def trained(self) -> list[nn.Module | Optimizer]:
        """The models and optimizers."""
        return [*self.models, *self.optimizers]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every model, without duplicates."""
        yield from {id(parameter): parameter for model in self.models for parameter in parameters_of(model)}.values()
