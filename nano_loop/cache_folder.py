"""The folder for what later runs can use again: ``$XDG_CACHE_HOME/nano_loop``, by default ``~/.cache/nano_loop``."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 25  # of a JSON file that is read


def cache_folder() -> Path | None:
    """Return the cache folder, which only this user can write to, since what is in it is trusted; None without one."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = parent / "nano_loop"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home folder, or not writable
        return None
    own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own and private and os.access(folder, os.W_OK) else None


@contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """Give the path of a file to make, which is then moved into place, for processes that read it meanwhile."""
    with tempfile.TemporaryDirectory(prefix="making-", dir=path.parent) as folder:
        yield Path(folder) / path.name
        (Path(folder) / path.name).replace(path)


class JsonFile:
    """A JSON object in a file, which other processes may write too, and which may be damaged.

    Parameters
    ----------
    path : pathlib.Path or None
        The file. None: nothing is kept.
    version : int
        The version of the format. A file of another one counts as empty.
    """

    def __init__(self, path: Path | None, version: int) -> None:
        self._path = path
        self._version = version

    def read(self) -> dict[str, Any]:
        """Return the content. A damaged file counts as empty."""
        try:
            if self._path is None or self._path.stat().st_size > _MOST_BYTES:
                return {}
            content = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) and content.get("format") == self._version else {}

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file. One that cannot be written is left as it is, and so is one for what JSON does not know."""
        if self._path is None:
            return
        with suppress(OSError, TypeError):
            text = json.dumps({"format": self._version, **content})
            with written_at_once(self._path) as path:
                path.write_text(text)
