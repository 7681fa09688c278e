"""Functions of compiled code that open files by their paths, and how a rank lets each open its private file."""

from __future__ import annotations

import inspect
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any
from urllib.parse import quote

from nano_loop.distributed.files.functions import redirected
from nano_loop.distributed.files.reading import naming
from nano_loop.distributed.files.replacements import Replacement, replaced_class
from nano_loop.distributed.files.table import Table
from nano_loop.patching.torch_private import FILE_CLASSES

_Argument = Callable[[int, str, Any], Any]  # gives one of a call's by its position, its name and its default


def _reads(table: Table, path: Any, argument: _Argument) -> Any:
    return table.reading(path)


def _replaces(table: Table, path: Any, argument: _Argument) -> Any:
    key = table.key(path)
    status = table.seen(key)
    return table.new(key) if status is None or stat.S_ISREG(status.st_mode) else path


def _edits(table: Table, path: Any, argument: _Argument) -> Any:
    key = table.key(path)
    return table.new(key) if table.seen(key) is None else table.own(key)


def _maps(table: Table, path: Any, argument: _Argument) -> Any:
    return (_edits if argument(1, "shared", False) else _reads)(table, path, argument)


def _by_mode(position: int, default: str) -> Callable[[Table, Any, _Argument], Any]:
    def opened(table: Table, path: Any, argument: _Argument) -> Any:
        mode = argument(position, "mode", default).replace("b", "")
        return {"r": _reads, "w": _replaces}.get(mode, _edits)(table, path, argument)

    return opened


def _opens_sqlite(table: Table, path: Any, argument: _Argument) -> Any:
    """Give a database of the caller's for reading alone: SQLite refuses to write to it, or to make it."""
    name = os.fsdecode(path)
    if name in ("", ":memory:") or argument(7, "uri", False) or table.is_shared(key := table.key(name)):
        return path
    if table.is_rank_0:  # of a trial: the caller waits for it
        return _edits(table, path, argument)
    if (place := table.place(key)) != key:
        return place or table.new(key)
    table.read_only.add(key)
    return _ReadOnly(key)


class _ReadOnly(str):
    """The path of a database that is opened for reading."""


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
        Returns what it is to open instead.
    """

    module: str
    name: str
    position: int
    parameter: str
    opened: Callable[[Table, Any, _Argument], Any]


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
    Native("sqlite3.dbapi2", "connect", 0, "database", _opens_sqlite),
    Native("cv2", "imwrite", 0, "filename", _replaces),
    Native("cv2", "imread", 0, "filename", _reads),
    Native("h5py", "File.__init__", 1, "name", _by_mode(2, "r")),
    Native("pyarrow", "memory_map", 0, "path", _by_mode(1, "r")),
    Native("pyarrow", "OSFile", 0, "path", _by_mode(1, "r")),
)


def natives_by_module() -> dict[str, list[Native]]:
    """Return the functions by the names of their modules."""
    modules: dict[str, list[Native]] = {}
    for native in NATIVE:
        modules.setdefault(native.module, []).append(native)
    return modules


def replacements_in(table: Table, module: ModuleType, natives: Iterable[Native]) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield what is to be replaced in a module: owners, names, originals and replacements."""
    for native in natives:
        owner: Any = module
        *owners, name = native.name.split(".")
        for step in owners:
            owner = getattr(owner, step, None)
        original = getattr(owner, name, None)
        if original is not None:  # other versions have not all of them
            yield owner, name, original, _replacement(table, owner, original, native)


def _replacement(table: Table, owner: Any, original: Any, native: Native) -> Any:
    function = _redirected(table, original, native)
    if inspect.isclass(original):
        return replaced_class(original, native.module, function)
    if inspect.isclass(owner) and native.position > 0:
        return wraps(original)(function)  # a method
    return Replacement(function, original, native.module)


def _redirected(table: Table, original: Any, native: Native) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        def argument(position: int, name: str, default: Any = None) -> Any:
            return args[position] if len(args) > position else options.get(name, default)

        path = argument(native.position, native.parameter)
        if not table.root or not isinstance(path, (str, bytes, os.PathLike)):
            return original(*args, **options)
        with naming(path), redirected:
            place: Any = native.opened(table, path, argument)
            if isinstance(place, _ReadOnly):
                place, options = f"file:{quote(place)}?mode=ro", options | {"uri": True}
            if len(args) > native.position:
                changed = (*args[: native.position], place, *args[native.position + 1 :])
                return original(*changed, **options)
            return original(*args, **options | {native.parameter: place})

    return function
