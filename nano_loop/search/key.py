"""The key of a search: what its result depends on, which is the loop, the batch, the machine and the versions."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from nano_loop.config.environment import KERNELS
from nano_loop.patching.members import named_buffers_of, named_parameters_of
from nano_loop.patching.walk import CONTAINERS, attributes_of, code_in, items_of, walk
from nano_loop.runtime.run import RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.version import __version__

_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.Size)
_VARYING = (float, complex, str, bytes)  # times and paths, which differ from run to run
_LASTING = (int, range, slice, torch.dtype, torch.Size, Tensor, np.ndarray, *CONTAINERS)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_ITEMS, _DEPTH, _LONGEST = 64, 4, 200
_MOST = 10_000  # objects that are looked at for the code that they run
_PACKAGES = ("torch", "intel-extension-for-pytorch")
#: Where packages are, whose code is known by their versions.
_NOT_THE_USERS = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(str(Path(str(file)).parents[1]) for file in (torch.__file__, __file__)),
)


def key_of(task: RunTask, settings: Settings, fixed: Collection[str]) -> str | None:
    """Return a key that is equal for searches that find the same; None where the model is not known beforehand.

    No sample of a dataset is fetched. What counts of it are its class and what it holds: shapes, dtypes and settings.
    Of the loop, and of the classes of what it uses, it is their code, and the shapes, dtypes and settings that it
    names, less texts and fractions, which may be paths and times.
    """
    if task.parts is None:
        return None
    parts = task.parts
    options = {name: value for name, value in settings.options.as_dict().items() if name != "tune"}
    machine = settings.machine
    objects = [parts.models, parts.optimizers, parts.loaders, dict(sorted(task.names.items()))]
    whole = [_described(objects), sorted(map(repr, _code_of(objects)))]
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


def _described(value: Any, depth: int = 0, *, is_global: bool = False) -> Any:
    """Return a description of a value: no contents of tensors, and of large containers and deep objects a part.

    Of a global, it is without what may differ from run to run.
    """
    if is_global and isinstance(value, _VARYING):
        return type(value).__name__
    if isinstance(value, _PLAIN):
        return repr(value)[:_LONGEST]
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, _NAMED):
        return str(getattr(value, "__qualname__", value.__name__))
    if isinstance(value, nn.Module):
        return _ADDRESS.sub("", repr(value)), [*_tensors(value)], [*_settings(value)], value.training
    if isinstance(value, Optimizer):
        groups = [(len(group["params"]), group.get("fused"), group.get("foreach")) for group in value.param_groups]
        return type(value).__qualname__, groups
    items = _items(value)
    if is_global and not isinstance(value, CONTAINERS) and not _is_users(type(value)):
        items = [item for item in items if isinstance(item[1], _LASTING)]
    return (
        type(value).__qualname__,
        len(items),
        [_described(item, depth + 1, is_global=is_global) for item in items[:_ITEMS] if depth < _DEPTH],
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


def _settings(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the numbers that modules have as attributes, such as how often a block is repeated."""
    for name, module in model.named_modules():
        yield from ((f"{name}.{key}", repr(value)) for key, value in vars(module).items() if isinstance(value, int))


# --- code ---


class _Named(NamedTuple):
    """A value that code names as a global, or that a class or a function holds."""

    name: str
    description: str


def _code_of(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the user's code that the objects among some values run, and the values that it names."""
    for item in walk(_run_by(values), _named_by, most=_MOST):
        if isinstance(item, FunctionType) and _is_users(item):
            yield item.__qualname__, [_instructions(code) for code in code_in(item.__code__)]
        elif isinstance(item, _Named):
            yield item


def _run_by(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the functions and classes of the objects among some values."""
    for item in map(_function_of, walk(values, _held_by, depth=2 * _DEPTH, most=_MOST)):
        yield item if isinstance(item, (type, FunctionType)) else type(item)


def _held_by(value: Any) -> Iterable[Any]:
    """Return the values in an object that may have the user's code."""
    if isinstance(value, nn.Module):
        return value.modules()
    if isinstance(value, CONTAINERS):
        return [*items_of(value)][:_ITEMS]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    is_users = isinstance(value, (DataLoader, Dataset, Sampler)) or _is_users(type(value))
    return attributes_of(value) if is_users else ()


def _function_of(value: Any) -> Any:
    """Return the innermost function of a method, a property or a function that is wrapped; other values as they are."""
    function = getattr(value, "fget", None) if isinstance(value, property) else value
    function = getattr(function, "__func__", function)
    return inspect.unwrap(function) if isinstance(function, FunctionType) else value


def _named_by(item: Any) -> Iterator[Any]:
    """Yield the attributes of a user's class, or the values that a user's function names and holds."""
    if isinstance(item, type):
        for base in item.__mro__ if _is_users(item) else ():
            values = [*vars(base).items()]
            yield from (_function_of(value) for _, value in values)
            yield from (_named(name, value) for name, value in values if isinstance(value, _LASTING))
    elif isinstance(item, FunctionType) and _is_users(item):
        yield _named(item.__qualname__, (item.__defaults__, item.__kwdefaults__))
        for name, value in _variables_of(item):
            yield from _run_by([value])
            if not isinstance(value, (type, FunctionType)):
                yield _named(name, value)


def _named(name: str, value: Any) -> _Named:
    return _Named(name, repr(_described(value, is_global=True)))


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals and closure variables that a function names, and the names of modules among them."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for code in code_in(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            if not isinstance(value, ModuleType):
                yield name, value
            elif _is_users(value):
                yield from ((other, vars(value)[other]) for other in code.co_names if other in vars(value))


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return what code does, without its place in a file."""
    constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
    texts = [sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value) for value in constants]
    return code.co_code, texts, code.co_names


def _is_users(item: type | FunctionType | ModuleType) -> bool:
    """Whether a class, a function or a module is the user's own, and not of a package that is installed."""
    name = item.__name__ if isinstance(item, ModuleType) else item.__module__
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return name == "__main__" or (file is not None and not file.startswith(_NOT_THE_USERS))
