"""The folder for what later runs can use again: ``$XDG_CACHE_HOME/nano_loop``, by default ``~/.cache/nano_loop``."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the cache folder, which only this user can write to, since what is in it is trusted; None without one."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = parent / "nano_loop"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # no home folder, or not writable
        return None
    own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own and private and os.access(folder, os.W_OK) else None
