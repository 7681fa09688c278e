"""Switches a process to private files: replaces Python's file functions by ones that use an overlay, and back."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import quote

from nano_loop.distributed.files.folder import began, cache_folders, discard, folders_of, place_of
from nano_loop.distributed.files.functions import Functions, naming
from nano_loop.distributed.files.landlock import keep_writes_in
from nano_loop.distributed.files.original_os import Replacement, original_os
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.distributed.files.refused import explaining_files
from nano_loop.distributed.files.shards import Shards

# Modules that store such functions in classes, default arguments, or dicts of objects.
_KEEPING = ("glob", "numpy.lib._datasource", "pathlib", "shutil", "tempfile")
_OURS = __name__.rpartition(".")[0]
_OF_MULTIPROCESSING = "pymp-"  # prefix of its folders, which contain sockets and are persistent
_sanitize = "_sanitize_params"  # tempfile's private function that chooses the folder; there is no public hook

_overlay = Overlay()


def redirect_files(run: Path, rank: int) -> None:
    """Make the writes of this process, a worker that ends with the run, private, in the folder that its run names."""
    _replace_functions(ExitStack())  # never closed: they last as long as the process
    place = f"{place_of(run)}/{rank}"
    original_os.mkdir(place, 0o700)
    _begin(rank, place, f"{place}/temporary", run, began(run))


def guard_files() -> None:
    """Let the kernel forbid this thread, and everything that it starts, to change the caller's files directly."""
    outside = ThreadPoolExecutor(1)
    outside.submit(os.getpid).result()  # started before this thread is restricted
    if keep_writes_in(_overlay.shared):
        _overlay.outside = outside
        tempfile.gettempdir()  # cached, so that the caller's files there are found
        os.environ["TMPDIR"] = _overlay.temporary  # programs such as a compiler may write nowhere else
        os.register_at_fork(after_in_child=lambda: setattr(_overlay, "outside", None))


@contextlib.contextmanager
def private_files(rank: int, own: Path, since: int, *shared: Path) -> Iterator[None]:
    """In the body, make the writes of this process private, a rank other than 0 that was started externally.

    `own` is its private folder, `shared` are those of the run. The run started at `since`, in ns by the file system
    clock.
    """
    with ExitStack() as stack:
        place = tempfile.mkdtemp(dir=place_of(own))
        stack.callback(discard, place)
        _replace_functions(stack)
        stack.callback(_overlay.end)
        stack.callback(_begin(rank, place, f"{place_of(own)}/temporary", own, since, *shared))
        stack.enter_context(explaining())
        yield


def explaining() -> AbstractContextManager[None]:
    """Make errors of a rank name the disk that is full, or the file that compiled code could not open."""
    return explaining_files(_overlay)


def shards() -> Shards:
    """Return the files of this rank that belong to the caller."""
    return _overlay.shards


def _begin(rank: int, place: str, temporary: str, own: Path, since: int, *shared: Path) -> Callable[[], None]:
    with contextlib.suppress(FileExistsError):
        original_os.mkdir(temporary, 0o700)
    _overlay.begin(rank, place, temporary, since, (*folders_of(own), *map(os.path.realpath, shared), *cache_folders()))
    # Compiled code binds sockets there, such as those by which a loader's workers send tensors.
    _overlay.shared += (os.path.join(os.path.realpath(tempfile.gettempdir()), _OF_MULTIPROCESSING),)
    return _keep_temporary_files_in(temporary)


def _replace_functions(undo: ExitStack) -> None:
    """Replace Python's functions and compiled ones until `undo`."""
    replaced = [*_of_python()]
    for name in COMPILED:  # now, so that modules that are imported later get the replacements by name
        with contextlib.suppress(Exception):  # it may not be installed
            import_module(name)
    for name in COMPILED.keys() & sys.modules.keys():
        replaced.extend(replacements_in(_overlay, sys.modules[name]))
    undo.callback(lambda: _swap([(owner, name, new, old) for owner, name, old, new in replaced]))
    _swap(replaced)


def _of_python() -> Iterator[tuple[Any, str, Any, Any]]:
    functions = Functions(_overlay)
    for name, function in functions.of_os().items():
        yield os, name, getattr(original_os, name), Replacement(function, getattr(original_os, name), "os")
    opening = Replacement(functions.open_file, original_os.open_file, "io")
    yield from ((owner, "open", original_os.open_file, opening) for owner in (builtins, io))
    yield shutil, "rmtree", original_os.rmtree, Replacement(functions.remove_tree, original_os.rmtree, "shutil")


def _swap(pairs: Iterable[tuple[Any, str, Any, Any]]) -> None:
    """Replace old values by new ones where they are defined, and wherever modules have imported them by name."""
    replaced = {id(old): new for _, _, old, new in pairs}
    for owner, name, _, new in pairs:
        setattr(owner, name, new)
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not str(names.get("__name__")).startswith(_OURS):
            _replace_values(names, replaced)
    for name in _KEEPING:
        if name in sys.modules:
            _replace_where_kept(sys.modules[name], replaced)


def _replace_values(names: dict[Any, Any], replaced: Mapping[int, Any]) -> None:
    for name in [name for name, value in [*names.items()] if id(value) in replaced]:
        names[name] = replaced[id(names[name])]


def _replace_where_kept(module: ModuleType, replaced: Mapping[int, Any]) -> None:
    """Replace values stored in a module's classes, functions and objects."""
    values = [*vars(module).values()]
    for value in values:
        if type(value).__module__ == module.__name__:
            for kept in vars(value).values():
                if isinstance(kept, dict):
                    _replace_values(kept, replaced)
    classes = [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]
    for owner in (module, *classes):
        for name, value in [*vars(owner).items()]:
            kept = value.__func__ if isinstance(value, staticmethod) and id(value) not in replaced else value
            if id(kept) in replaced:
                setattr(owner, name, replaced[id(kept)])
            elif isinstance(kept, FunctionType) and kept.__defaults__:
                kept.__defaults__ = tuple(replaced.get(id(value), value) for value in kept.__defaults__)


def _keep_temporary_files_in(folder: str) -> Callable[[], None]:
    """Make `tempfile` use a folder for real files, but not in `gettempdir()`; return a function that undoes it."""
    original = getattr(tempfile, _sanitize, None)
    if original is None:
        return lambda: None

    def sanitized(prefix: Any, suffix: Any, dir: Any) -> Any:
        prefix, suffix, chosen, kind = original(prefix, suffix, dir)
        if dir is None and prefix != _OF_MULTIPROCESSING:
            chosen = os.fsencode(folder) if kind is bytes else folder
        return prefix, suffix, chosen, kind

    setattr(tempfile, _sanitize, sanitized)
    return lambda: setattr(tempfile, _sanitize, original)


# # --- functions of compiled code, which receive private paths ---

_Function = Callable[..., Any]
_Replacing = Callable[[Overlay, _Function], _Function]  # creates the replacement of a function


def _at(position: int, parameter: str, opened: Callable[[Overlay, Any], Any]) -> _Replacing:
    """Return a factory of replacements for a function that accepts a path at a position or by keyword."""

    def replacing(overlay: Overlay, original: _Function) -> _Function:
        def function(*args: Any, **options: Any) -> Any:
            path = args[position] if len(args) > position else options.get(parameter)
            if not overlay.root or not isinstance(path, (str, bytes, os.PathLike)):
                return original(*args, **options)
            with naming(path):
                if len(args) > position:
                    place = opened(overlay, path)
                    return original(*args[:position], place, *args[position + 1 :], **options)
                return original(*args, **options | {parameter: opened(overlay, path)})

        return function

    return replacing


def _connect_function(overlay: Overlay, original: _Function) -> _Function:
    """Return a function that opens the caller's databases read-only: SQLite refuses to write to or create them."""

    def connect(database: Any, *args: Any, **options: Any) -> Any:
        name = os.fsdecode(database)
        if not overlay.root or name in ("", ":memory:") or options.get("uri"):
            return original(database, *args, **options)
        key = overlay.key(name)
        if overlay.is_shared(key) or overlay.at(key)[0] != key:
            return original(overlay.writing(name), *args, **options)
        overlay.databases.add(key)
        return original(f"file:{quote(key)}?mode=ro", *args, **options | {"uri": True})

    return connect


#: The functions by module and name, each with the factory of its replacement.
COMPILED: dict[str, dict[str, _Replacing]] = {
    "torch": {"save": _at(1, "f", Overlay.writing), "load": _at(0, "f", Overlay.reading)},
    "torch.autograd.profiler": {"profile.export_chrome_trace": _at(1, "path", Overlay.writing)},
    "safetensors": {
        "serialize_file": _at(1, "filename", Overlay.writing),
        "safe_open": _at(0, "filename", Overlay.reading),
    },
    "sqlite3": {"connect": _connect_function},
}


def replacements_in(overlay: Overlay, module: ModuleType) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield the replacements for a module: owners, names, originals and new values."""
    for name, replacing in COMPILED[module.__name__].items():
        *owners, own = name.split(".")
        owner: Any = module
        for step in owners:
            owner = getattr(owner, step)
        original = getattr(owner, own)
        function = replacing(overlay, original)
        replacement = wraps(original)(function) if owners else Replacement(function, original, module.__name__)
        yield owner, own, original, replacement
