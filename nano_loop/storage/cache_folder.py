"""The folder for data that later runs reuse: ``$XDG_CACHE_HOME/nano_loop``, by default ``~/.cache/nano_loop``."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nano_loop.errors import NanoError
from nano_loop.storage.trusted_files import opened_folder, read_file, resolved, write_file

_MOST_BYTES = 1 << 25  # maximum size of a JSON file


def cache_path() -> Path | None:
    """Return the path of the cache folder, which may not exist; None for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano_loop"
    except RuntimeError:
        return None


def cache_folder() -> Path | None:
    """Return the cache folder, created if necessary and possible; its files must be opened by `trusted_files`."""
    folder = cache_path()
    if folder is None:
        return None
    try:
        for place in (folder.parent, folder):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # not writable
        return None
    with suppress(OSError, NanoError):
        return resolved(folder)
    return folder  # `open_folder` raises if something is wrong with it


def inductor_folder() -> str:
    """Return the default cache folder of torch's compiler; an empty string for a user without a name."""
    try:
        return os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    except (KeyError, OSError):
        return ""


class JsonFile:
    """A JSON object of a version in a file, if any, that may be damaged, and that other processes may write."""

    def __init__(self, path: Path | None, version: int) -> None:
        self._path = path
        self._version = version

    def read(self) -> dict[str, Any]:
        """Return the content. Files that are damaged or that another user could change count as empty."""
        if self._path is None:
            return {}
        try:
            with opened_folder(self._path.parent) as folder:
                content = json.loads(read_file(self._path.name, folder, _MOST_BYTES))
        except (OSError, NanoError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) and content.get("format") == self._version else {}

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file. It does not change if it cannot be written, or JSON does not support the content."""
        if self._path is None:
            return
        with suppress(OSError, NanoError, TypeError):
            text = json.dumps({"format": self._version, **content})
            with opened_folder(self._path.parent) as folder:
                write_file(self._path.name, folder, text.encode())
