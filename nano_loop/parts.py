"""The user's objects that one call of ``setup`` hands to the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; for a scripted module that of the class it was made of."""
    return str(module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__)


@dataclass
class Parts:
    """Models, optimizers and loaders, as the user made them.

    Parameters
    ----------
    models : list of torch.nn.Module
        The models, which the steps change in place.
    optimizers : list of torch.optim.Optimizer
        The optimizers, changed in place.
    loaders : list of torch.utils.data.DataLoader
        The loaders, which keep their class and attributes.
    shard : bool or None
        Whether the loaders are always, or never, divided among the ranks; None leaves it to the models' mode.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    shard: bool | None = None

    @property
    def trained(self) -> list[nn.Module | torch.optim.Optimizer]:
        """Models and optimizers: what there is to train."""
        return [*self.models, *self.optimizers]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every model, each once."""
        seen: set[int] = set()
        for model in self.models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
