"""The entries of a folder as `os.scandir` returns them, of folders with private files."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any


class DirectoryEntry(os.PathLike[Any]):
    """What `os.DirEntry` is, of something that may be private.

    Parameters
    ----------
    name, path : str or bytes
        As `os.DirEntry` has them.
    key : str
        The path from the root folder on.
    """

    def __init__(self, name: Any, path: Any, key: str) -> None:
        self.name, self.path, self._key = name, path, key

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        """See `os.DirEntry`."""
        return os.lstat(self._key).st_ino

    def is_junction(self) -> bool:
        """See `os.DirEntry`: there are none outside Windows."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """See `os.DirEntry`."""
        return os.stat(self._key, follow_symlinks=follow_symlinks)

    def _is(self, kind: Any, *, follow_symlinks: bool = True) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow_symlinks).st_mode))
        except FileNotFoundError:
            return False

    is_dir = functools.partialmethod(_is, S_ISDIR)
    is_file = functools.partialmethod(_is, S_ISREG)
    is_symlink = functools.partialmethod(_is, S_ISLNK, follow_symlinks=False)


class DirectoryEntries(AbstractContextManager["DirectoryEntries"], Iterator[Any]):
    """The iterator that `os.scandir` returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more entries."""
        self._entries = iter(())
