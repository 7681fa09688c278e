"""Finds the modules whose objects a call uses in a worker, and the attributes that its functions name.

A module of the program (outside site-packages) is reached through its classes and functions, through code that names
it, and through other modules of the program. A library module is reached if the program's code names an object of it.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from itertools import chain, islice
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from nano_loop.cpu.process import process_start
from nano_loop.distributed.payload.code_reductions import is_sent
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.walk import CONTAINERS, code_in, items_of, named_attributes_of, walk

#: Packages with process-wide state, which a worker receives in other ways or manages itself.
NOT_COMPARED = {
    *sys.stdlib_module_names,
    *("nano_loop", "torch", "numpy", "cloudpickle", "lightning_fabric", "lightning", "pytorch_lightning", "ray"),
    *("pytest", "_pytest", "IPython", "ipykernel"),
}
_LONGEST = 100  # maximum number of items to visit per container
_MOST = 20_000  # maximum number of objects to visit
_LIBRARIES = ("site-packages", "dist-packages")


class ReachedModules:
    """The modules that objects sent to a worker reach; see the module's docstring."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.modules: dict[str, ModuleType] = {}  # of the program and of libraries, by name
        #: Pairs of modules and attributes that functions in `roots`, or functions that these call, name.
        self.named: set[tuple[str, str]] = set()
        self._functions: list[tuple[ModuleType, FunctionType]] = []  # functions of the program that workers import
        for _ in walk(roots, self._contents, most=_MOST):
            pass

    def refuse_edited(self) -> None:
        """Raise a NanoError if a function's module was edited after its import: a worker would use the new code.

        The code in memory is compared with files that are newer than this process, since Python does not keep the
        source.
        """
        codes: dict[str, set[CodeType]] = defaultdict(set)
        for module, function in self._functions:
            # Other loaders may compile differently, such as pytest's.
            loader = getattr(module.__spec__, "loader", None)
            if type(loader) is SourceFileLoader and function.__code__.co_filename == loader.path:  # not a decorator's
                codes[loader.path].add(function.__code__)
        for path, known in codes.items():
            if _has_changed(path, known):
                got = f"{path} has changed since it was imported"
                expected = "worker processes import that file, and would run different code"
                raise NanoError(error_message(got, expected, "Restart the program"))

    def _contents(self, value: Any) -> Iterable[Any]:
        kind = type(value)  # isinstance would run a user's __class__ property
        if issubclass(kind, ModuleType):
            return self._of_module(value)
        if kind is FunctionType:
            return self._of_function(value)
        if issubclass(kind, type):
            return self._of_class(value)
        if issubclass(kind, (MethodType, staticmethod, classmethod)):
            return (value.__func__, getattr(value, "__self__", None))
        if issubclass(kind, property):
            return (value.fget, value.fset)
        if issubclass(kind, functools.partial):
            return (value.func, value.args, value.keywords)
        if issubclass(kind, CONTAINERS):
            return (kind, *islice(items_of(value), _LONGEST), *{*map(type, items_of(value))})
        if kind.__module__ == "builtins" or issubclass(kind, (torch.Tensor, np.ndarray)):
            return (kind,)
        if issubclass(kind, Optimizer) or (issubclass(kind, nn.Module) and package_of(kind) == "torch"):
            held = (part.values() if isinstance(part, dict) else (part,) for part in vars(value).values())
            return (kind, *filter(callable, chain.from_iterable(held)))  # its children, hooks and activations
        return (kind, value.__wrapped__ if is_cache(value) else None, *dict(named_attributes_of(value)).values())

    def _of_module(self, module: ModuleType) -> Iterator[Any]:
        name = module.__name__
        if not is_program(module):
            return
        self.modules[name] = module
        yield sys.modules.get(name.rpartition(".")[0])
        for attribute, value in vars(module).copy().items():
            if not issubclass(type(value), ModuleType):
                kind = value if isinstance(value, (type, FunctionType)) else type(value)
                yield sys.modules.get(str(kind.__module__))
            elif value.__name__ != f"{name}.{attribute}":  # a package has its imported submodules as attributes
                yield value

    def _of_class(self, kind: type) -> Iterator[Any]:
        module = sys.modules.get(kind.__module__)
        if module is None or not (is_program(module) or is_sent(module.__name__)):
            return
        self.named.add((module.__name__, kind.__qualname__.partition(".")[0]))
        yield from (module, type(kind), *kind.__bases__, *vars(kind).values())

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        """Yield the objects that a program's function names: globals, their attributes, and imports."""
        yield getattr(function, "__wrapped__", None)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                yield cell.cell_contents
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module is None or not (is_program(module) or is_sent(module.__name__)):
            self._add_library(module)
            return
        if is_program(module):
            self._functions.append((module, function))
        yield from (module, function.__defaults__, function.__kwdefaults__)
        names, imported = _named_in(function.__code__)
        owners: list[Any] = [*_imported(imported, module)]
        for name in names & function.__globals__.keys():
            self.named.add((module.__name__, name))
            owners.append(function.__globals__[name])
        for owner in walk(owners, lambda owner: self._attributes(owner, names), depth=8):
            self._note_library(owner)
            yield owner

    def _attributes(self, owner: Any, names: frozenset[str]) -> Iterator[Any]:
        """Yield the attributes of a module or class that code may name."""
        if not isinstance(owner, (ModuleType, type)) or package_of(owner) in NOT_COMPARED:
            return
        for name in names & vars(owner).keys():
            value = vars(owner)[name]
            if isinstance(owner, ModuleType):
                self.named.add((owner.__name__, name))
                if not isinstance(value, (ModuleType, type, FunctionType)):
                    self._add_library(owner)
            yield value

    def _note_library(self, value: Any) -> None:
        """Record the library module that defines an object named by the program."""
        kind = value if isinstance(value, (type, FunctionType)) else type(value)
        if not isinstance(value, ModuleType):
            self._add_library(sys.modules.get(str(kind.__module__)))
        if isinstance(value, type):
            self._add_library(sys.modules.get(type(value).__module__))

    def _add_library(self, module: Any) -> None:
        if isinstance(module, ModuleType) and not is_program(module) and _is_comparable(module):
            self.modules[module.__name__] = module


def is_program(module: ModuleType) -> bool:
    """Whether a module is part of the program, and other processes import it."""
    return _is_comparable(module) and not any(part in str(module.__file__) for part in _LIBRARIES)


def is_cache(value: Any) -> bool:
    """Whether a function caches its results by `functools.lru_cache`."""
    return type(value) is _CACHE


def package_of(value: ModuleType | type) -> str:
    """Return the top-level package of a module or class."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(name).partition(".")[0]


_CACHE = type(lru_cache(lambda: None))


def _is_comparable(module: ModuleType) -> bool:
    name = module.__name__
    if type(module) is not ModuleType or sys.modules.get(name) is not module or is_sent(module.__name__):
        return False
    spec = module.__spec__
    return spec is not None and spec.name == name and bool(spec.has_location) and package_of(module) not in NOT_COMPARED


def _imported(names: Iterable[str], module: ModuleType) -> Iterator[ModuleType | None]:
    """Yield the modules that a module's code imports, resolving relative names."""
    package = str(vars(module).get("__package__") or "")
    parents = ["", *(f"{'.'.join(package.split('.')[:end])}." for end in range(1, package.count(".") + 2) if package)]
    for name in names:
        parts = name.split(".")
        for parent in parents:
            yield from (sys.modules.get(parent + ".".join(parts[: end + 1])) for end in range(len(parts)))


@lru_cache(maxsize=1000)
def _named_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of variables and attributes in code, and the names of modules that it imports."""
    names = {*code.co_names}
    imported = {step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, more = _named_in(constant)
            names |= inner
            imported |= more
    return frozenset(names), frozenset(imported)


def _has_changed(path: str, codes: set[CodeType]) -> bool:
    try:
        if os.stat(path).st_ctime < process_start():
            return False
        return not codes <= {*code_in(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True))}
    except OSError:  # deleted; the worker reports this
        return False
    except (SyntaxError, ValueError):  # it is being edited
        return True
