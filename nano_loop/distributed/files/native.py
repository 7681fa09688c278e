"""Functions of compiled code that open files by their paths, and how a worker lets each open its private copy."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nano_loop.distributed.files.copies import Access, accessed
from nano_loop.distributed.files.databases import opened_database
from nano_loop.distributed.files.functions import Replacement, replaced_class
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.intercept.torch_private import FILE_CLASSES

_Argument = Callable[[int, str, Any], Any]  # gives one of a call's by its position, its name and its default


def _reads(overlay: Overlay, path: Any, argument: _Argument, original: Any) -> AbstractContextManager[Any]:
    return accessed(overlay, path, Access.READ)


def _replaces(overlay: Overlay, path: Any, argument: _Argument, original: Any) -> AbstractContextManager[Any]:
    return accessed(overlay, path, Access.REPLACE)


def _maps(overlay: Overlay, path: Any, argument: _Argument, original: Any) -> AbstractContextManager[Any]:
    return accessed(overlay, path, Access.EDIT if argument(1, "shared", False) else Access.READ)


def _opens_hdf5(overlay: Overlay, path: Any, argument: _Argument, original: Any) -> AbstractContextManager[Any]:
    modes = {"r": Access.READ, "w": Access.REPLACE}
    return accessed(overlay, path, modes.get(argument(2, "mode", "r"), Access.EDIT))


def _opens_sqlite(overlay: Overlay, path: Any, argument: _Argument, original: Any) -> AbstractContextManager[Any]:
    return opened_database(overlay, path, bool(argument(7, "uri", False)), original)


@dataclass(frozen=True)
class Native:
    """One such function.

    Parameters
    ----------
    module, name : str
        Where it is; a method is named with its class.
    position, parameter : int, str
        Where it takes the path.
    opened : callable
        Returns a context that gives what it is to open instead.
    """

    module: str
    name: str
    position: int
    parameter: str
    opened: Callable[[Overlay, Any, _Argument, Any], AbstractContextManager[Any]]


_C, _WRITER, _READER = FILE_CLASSES
NATIVE = (
    Native(_C, _WRITER, 0, "file_name", _replaces),
    Native(_C, _READER, 0, "file_name", _reads),
    Native("torch", "from_file", 0, "filename", _maps),
    Native("torch", "UntypedStorage.from_file", 0, "filename", _maps),
    Native("torch.autograd.profiler", "profile.export_chrome_trace", 1, "path", _replaces),
    Native("torch.jit", "RecursiveScriptModule.save", 1, "f", _replaces),
    Native("torch.jit", "ScriptModule.save", 1, "f", _replaces),
    Native("torch.jit", "ScriptFunction.save", 1, "filename", _replaces),
    Native("torch.jit", "load", 0, "f", _reads),
    Native("torchvision.io.image", "write_file", 0, "filename", _replaces),
    Native("torchvision.io.image", "read_file", 0, "path", _reads),
    Native("safetensors", "serialize_file", 1, "filename", _replaces),
    Native("safetensors", "safe_open", 0, "filename", _reads),
    Native("_sqlite3", "connect", 0, "database", _opens_sqlite),
    Native("cv2", "imwrite", 0, "filename", _replaces),
    Native("cv2", "imread", 0, "filename", _reads),
    Native("h5py", "File.__init__", 1, "name", _opens_hdf5),
)


def redirect_native(overlay: Overlay, natives: Iterable[Native] = NATIVE) -> dict[int, tuple[Any, Any]]:
    """Replace the functions whose modules have been imported, and the others as soon as they are.

    Returns
    -------
    dict
        The functions that were replaced at once, each with its replacement, by their ids.
    """
    waiting: dict[str, list[Native]] = {}
    for native in natives:
        waiting.setdefault(native.module, []).append(native)
    replaced = {}
    for name in [name for name in waiting if name in sys.modules]:
        replaced.update(_redirect(overlay, sys.modules[name], waiting.pop(name)))
    sys.meta_path.insert(0, WhenImported(waiting, lambda module, natives: _redirect(overlay, module, natives)))
    return replaced


def _found(module: ModuleType, native: Native) -> tuple[Any, Any]:
    """Return the module or class that has a function, and the function; None for what this version has not."""
    *owners, name = native.name.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each, None)
    return owner, getattr(owner, name, None)


def _redirect(overlay: Overlay, module: ModuleType, natives: Iterable[Native]) -> dict[int, tuple[Any, Any]]:
    replaced = {}
    for native in natives:
        name = native.name.rpartition(".")[2]
        owner, original = _found(module, native)
        if original is not None:
            replacement = _replacement(overlay, owner, original, native)
            setattr(owner, name, replacement)
            replaced[id(original)] = original, replacement
    return replaced


def _replacement(overlay: Overlay, owner: Any, original: Any, native: Native) -> Any:
    function = _redirected(overlay, original, native)
    if inspect.isclass(original):
        return replaced_class(function, original, native.module)
    if inspect.isclass(owner) and native.position > 0:
        return wraps(original)(function)  # a method
    return Replacement(function, original, native.module)


def _redirected(overlay: Overlay, original: Any, native: Native) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        def argument(position: int, name: str, default: Any = None) -> Any:
            return args[position] if len(args) > position else options.get(name, default)

        path = argument(native.position, native.parameter)
        if not isinstance(path, (str, bytes, os.PathLike)):
            return original(*args, **options)
        with native.opened(overlay, path, argument, original) as place:
            if len(args) > native.position:
                changed = (*args[: native.position], place, *args[native.position + 1 :])
                return original(*changed, **options)
            return original(*args, **options | {native.parameter: place})

    return function


class WhenImported(MetaPathFinder):
    """Does something with modules as soon as they have been imported, before their importers go on.

    Parameters
    ----------
    waiting : dict
        What is to be done, by the names of the modules; each is taken out when it is done.
    do : callable
        Is given a module, and what was to be done with it.
    """

    def __init__(self, waiting: dict[str, Any], do: Callable[[ModuleType, Any], object]) -> None:
        self._waiting, self._do = waiting, do

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader.exec_module = self._executing(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
                return spec
        return None

    def _executing(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in self._waiting:
                self._do(module, self._waiting.pop(module.__name__))

        return exec_module
