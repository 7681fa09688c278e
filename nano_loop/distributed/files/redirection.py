"""Puts what a worker uses instead of Python's functions for files in their places."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from nano_loop.distributed.files.functions import Replacement
from nano_loop.distributed.files.importers import replace_in_importers, replace_values
from nano_loop.distributed.files.native import redirect_native
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.os_functions import os_functions
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.distributed.files.python_io import file_io, keep_temporary_files_in, opening, removing_tree
from nano_loop.distributed.files.unseen import warn_of_unseen_changes

# Modules that keep such functions in classes, in default arguments, or in dicts of objects.
_KEEPING = ("glob", "numpy.lib._datasource", "pathlib", "shutil", "tempfile")
_Replaced = Mapping[int, tuple[Any, Any]]  # originals with their replacements, by the ids of the former


def redirect(place: str, since: int, shared: Iterable[str], sockets: str) -> Overlay:
    """Let this process, and those that it forks, change private copies of files, for as long as it lives.

    Parameters
    ----------
    place, since, shared
        See `Overlay.begin`.
    sockets : str
        An existing folder of a short path, for those of multiprocessing that hold sockets.
    """
    overlay = prepare()
    temporary = f"{place}/temporary"
    real.mkdir(temporary, 0o700)
    keep_temporary_files_in(temporary, sockets)
    overlay.begin(place, since, shared)
    return overlay


def prepare() -> Overlay:
    """Replace the functions, in this process and in those that it forks; until `redirect` they do what they did before.

    To replace them takes 10 ms in a forked process, which copies each page of memory that it writes to. So the process
    that workers are forked from does it once.
    """
    if not _prepared:
        _prepared.append(Overlay())
        _replace_functions(_prepared[0])
    return _prepared[0]


_prepared: list[Overlay] = []  # one at the most


def _replace_functions(overlay: Overlay) -> None:
    replaced = {**_redirect_os(overlay), **_redirect_io(overlay), **redirect_native(overlay)}
    replace_in_importers(replaced)
    for name in _KEEPING:
        if name in sys.modules:
            _replace_where_kept(sys.modules[name], replaced)
    os.register_at_fork(after_in_parent=overlay.changes.share, after_in_child=overlay.share_in_child)
    warn_of_unseen_changes(overlay)


def _redirect_os(overlay: Overlay) -> dict[int, tuple[Any, Any]]:
    replaced = {}
    for name, function in os_functions(overlay).items():
        original = getattr(real, name)
        replacement = Replacement(function, original, "os")
        _set(replacement, name, os, sys.modules[original.__module__])
        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in supporting:
                supporting.add(replacement)
        replaced[id(original)] = original, replacement
    return replaced


def _redirect_io(overlay: Overlay) -> dict[int, tuple[Any, Any]]:
    open_copy = Replacement(opening(overlay), real.open_file, "io")
    kind = file_io(overlay)
    rmtree = shutil.rmtree
    remove_tree = Replacement(removing_tree(overlay), rmtree, "shutil")
    private_io = importlib.import_module("_io")
    _set(open_copy, "open", builtins, io, private_io)
    _set(kind, "FileIO", io, private_io)
    _set(remove_tree, "rmtree", shutil)
    pairs = ((real.open_file, open_copy), (real.FileIO, kind), (rmtree, remove_tree))
    return {id(original): (original, replacement) for original, replacement in pairs}


def _set(value: Any, name: str, *owners: Any) -> None:
    for owner in owners:
        setattr(owner, name, value)


def _replace_where_kept(module: Any, replaced: _Replaced) -> None:
    """Replace what the classes, functions and objects of a module keep."""
    for value in vars(module).values():
        if type(value).__module__ == module.__name__:
            for kept in vars(value).values():
                if isinstance(kept, dict):
                    replace_values(kept, replaced)
    for owner in (module, *_classes(vars(module).values(), module.__name__)):
        for name, value in [*vars(owner).items()]:
            kept = value.__func__ if isinstance(value, staticmethod) and id(value) not in replaced else value
            if id(kept) in replaced:
                setattr(owner, name, replaced[id(kept)][1])
            elif isinstance(kept, FunctionType) and kept.__defaults__:
                kept.__defaults__ = tuple(replaced.get(id(each), (each, each))[1] for each in kept.__defaults__)


def _classes(values: Iterable[Any], module: str) -> list[type]:
    return [value for value in values if isinstance(value, type) and value.__module__ == module]
