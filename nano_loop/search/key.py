"""The key of a search: what its result depends on, which is the model, the batch, the machine and the versions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from importlib import metadata
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.run import RunTask
from nano_loop.settings import Settings
from nano_loop.version import __version__

_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.Size)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_MOST, _ITEMS, _DEPTH, _LONGEST = 5000, 16, 5, 200
_PACKAGES = ("torch", "intel-extension-for-pytorch")


def key_of(task: RunTask, settings: Settings, fixed: Collection[str]) -> str | None:
    """Return a key that is equal for searches that find the same; None where the model is not known beforehand.

    No sample of a dataset is fetched. What counts of it are its class and what it holds: shapes, dtypes and settings.
    """
    if task.parts is None:
        return None
    lines = _Lines()
    lines.add(["parts", task.parts.models, task.parts.optimizers, task.parts.loaders])
    lines.add(sorted(task.names))
    for value in task.names.values():
        lines.add(value)
    options = {name: value for name, value in settings.options.as_dict().items() if name != "tune"}
    machine = settings.machine
    of_machine = [machine.name, machine.allowed, machine.quota, sorted(machine.instruction_sets)]
    whole = [lines.found, sorted(map(str, options.items())), sorted(fixed), of_machine, [*_versions()]]
    whole += [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


def _versions() -> Iterator[str]:
    yield __version__
    for name in _PACKAGES:
        try:
            yield metadata.version(name)
        except metadata.PackageNotFoundError:
            yield ""


class _Lines:
    """A description of values, line by line: no contents of tensors, and of large containers some items."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._seen: dict[int, Any] = {}

    def add(self, value: Any, depth: int = 0) -> None:
        """Describe a value."""
        if isinstance(value, _PLAIN):
            self.found.append(repr(value)[:_LONGEST])
        elif isinstance(value, (Tensor, np.ndarray)):
            self.found.append(f"{tuple(value.shape)} {value.dtype}")
        elif id(value) in self._seen or len(self._seen) > _MOST or depth > _DEPTH:
            self.found.append("...")
        else:
            self._seen[id(value)] = value
            self.found.append(type(value).__qualname__)
            self._add_contents(value, depth + 1)

    def _add_contents(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self._add_model(value)
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                self.add([len(group["params"]), {k: v for k, v in group.items() if k in ("fused", "foreach")}], depth)
        elif isinstance(value, _NAMED):
            self.found.append(str(getattr(value, "__qualname__", value.__name__)))
        elif isinstance(value, dict):
            self._add_items([*value.items()], depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self._add_items([*value] if isinstance(value, (list, tuple)) else [len(value)], depth)
        else:
            attributes = sorted(getattr(value, "__dict__", {}).items(), key=lambda item: str(item[0]))
            if isinstance(value, DataLoader):
                attributes = [(name, each) for name, each in attributes if not name.startswith("_")]
            self._add_items(attributes, depth)

    def _add_items(self, items: list[Any], depth: int) -> None:
        self.found.append(str(len(items)))
        for item in items[:_ITEMS]:
            self.add(item, depth)

    def _add_model(self, model: nn.Module) -> None:
        parameters = [(name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in _tensors(model)]
        self.found += [_ADDRESS.sub("", repr(model)), repr(parameters), str(model.training)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if not isinstance(each, nn.UninitializedParameter):
            yield name, each
