"""The cache folder, as `doctor` sees it: whether runs can keep in it what later runs use again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from nano_loop.errors import NanoError
from nano_loop.storage.cache_folder import cache_path
from nano_loop.storage.trusted_files import opened_folder


class CacheFolder(NamedTuple):
    """The cache folder, or where it would be made."""

    path: str  # empty for a user without a home folder
    is_writable: bool
    is_executable: bool  # whether libraries in it can be loaded: not where the file system is mounted noexec


def inspect_cache() -> CacheFolder:
    """Return what there is to know of the cache folder of this user."""
    folder = cache_path()
    if folder is None:
        return CacheFolder("", False, True)
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return CacheFolder(str(folder), _is_writable(place, place == folder), _is_executable(place))


def _is_writable(place: Path, is_cache: bool) -> bool:
    """Whether this user may write there, and nobody else into the cache folder itself, which is not used then."""
    if not os.access(place, os.W_OK | os.X_OK):
        return False
    if is_cache:
        try:
            with opened_folder(place):
                return True
        except (OSError, NanoError):
            return False
    return True


def _is_executable(place: Path) -> bool:
    flag = getattr(os, "ST_NOEXEC", 0)  # of Linux alone
    return not (flag and os.statvfs(place).f_flag & flag)
