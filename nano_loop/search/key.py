"""The key of a search: what its result depends on, which is the model, the batch, the machine and the versions."""

from __future__ import annotations

import hashlib
import os
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

from nano_loop.config.environment import KERNELS
from nano_loop.patching.members import named_buffers_of, named_parameters_of
from nano_loop.runtime.run import RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.version import __version__

_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.Size)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_ITEMS, _DEPTH, _LONGEST = 16, 4, 200
_PACKAGES = ("torch", "intel-extension-for-pytorch")


def key_of(task: RunTask, settings: Settings, fixed: Collection[str]) -> str | None:
    """Return a key that is equal for searches that find the same; None where the model is not known beforehand.

    No sample of a dataset is fetched. What counts of it are its class and what it holds: shapes, dtypes and settings.
    """
    if task.parts is None:
        return None
    parts = task.parts
    options = {name: value for name, value in settings.options.as_dict().items() if name != "tune"}
    machine = settings.machine
    whole = [_described([parts.models, parts.optimizers, parts.loaders, dict(sorted(task.names.items()))])]
    whole += [sorted(map(str, options.items())), sorted(fixed), machine.name, machine.allowed, machine.quota]
    whole += [sorted(machine.instruction_sets), [*_versions()], torch.get_num_threads()]
    whole += [torch.backends.cpu.get_cpu_capability(), os.environ.get(KERNELS)]
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


def _versions() -> Iterator[str]:
    yield __version__
    for name in _PACKAGES:
        try:
            yield metadata.version(name)
        except metadata.PackageNotFoundError:
            yield ""


def _described(value: Any, depth: int = 0) -> Any:
    """Return a description of a value: no contents of tensors, and of large containers and deep objects a part."""
    if isinstance(value, _PLAIN):
        return repr(value)[:_LONGEST]
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, _NAMED):
        return str(getattr(value, "__qualname__", value.__name__))
    if isinstance(value, nn.Module):
        return _ADDRESS.sub("", repr(value)), [*_tensors(value)], value.training
    if isinstance(value, Optimizer):
        groups = [(len(group["params"]), group.get("fused"), group.get("foreach")) for group in value.param_groups]
        return type(value).__qualname__, groups
    items = _items(value)
    return (
        type(value).__qualname__,
        len(items),
        [_described(item, depth + 1) for item in items[:_ITEMS] if depth < _DEPTH],
    )


def _items(value: Any) -> list[Any]:
    """Return what a container or an object holds, in an order that is the same in each process."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, (list, tuple)):
        return [*value]
    if isinstance(value, (set, frozenset)):
        return [len(value)]
    attributes = sorted(getattr(value, "__dict__", {}).items(), key=lambda item: str(item[0]))
    return [item for item in attributes if not (isinstance(value, DataLoader) and item[0].startswith("_"))]


def _tensors(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    for name, tensor in [*named_parameters_of(model), *named_buffers_of(model)]:
        if not isinstance(tensor, nn.UninitializedParameter):
            yield name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
