"""Functions of compiled code that checkpoints, traces and databases go through: a rank gives each its private path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any
from urllib.parse import quote

from nano_loop.distributed.files.functions import naming
from nano_loop.distributed.files.original_os import Replacement
from nano_loop.distributed.files.overlay import Overlay

_Function = Callable[..., Any]
_Replacing = Callable[[Overlay, _Function], _Function]  # makes the replacement of a function


def _at(position: int, parameter: str, opened: Callable[[Overlay, Any], Any]) -> _Replacing:
    """Return what makes the replacement of a function that takes a path at a position, or by a name."""

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
    """Return what opens the caller's databases for reading alone: SQLite refuses to write to one, or to make it."""

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


#: The functions by their modules and names, with what makes the replacement of each.
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
    """Yield what is to be replaced in a module: owners, names, originals and replacements."""
    for name, replacing in COMPILED[module.__name__].items():
        *owners, own = name.split(".")
        owner: Any = module
        for step in owners:
            owner = getattr(owner, step)
        original = getattr(owner, own)
        function = replacing(overlay, original)
        replacement = wraps(original)(function) if owners else Replacement(function, original, module.__name__)
        yield owner, own, original, replacement
