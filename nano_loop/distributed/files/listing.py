"""What `os.scandir` gives for a folder in which a worker has changed something."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.overlay import Overlay, missing


class Entry(os.PathLike[Any]):
    """What `os.DirEntry` is, of something that lies at another place than its path says.

    Parameters
    ----------
    overlay : Overlay
        What knows where it lies.
    key : str
        Its resolved path.
    name, path : str or bytes
        As `os.DirEntry` has them.
    """

    def __init__(self, overlay: Overlay, key: str, name: Any, path: Any) -> None:
        self.name, self.path = name, path
        self._overlay, self._key = overlay, key

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        """See `os.DirEntry`."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """See `os.DirEntry`."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """See `os.DirEntry`."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """See `os.DirEntry`."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """See `os.DirEntry`: there are none outside Windows."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """See `os.DirEntry`."""
        key = self._overlay.key(self._key, follow_symlinks)
        found = self._overlay.seen(key)
        if found is None:
            raise missing(self.path)
        return found

    def _is(self, kind: Any, follow: bool) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow).st_mode))
        except FileNotFoundError:
            return False


class Entries(AbstractContextManager["Entries"], Iterator[Any]):
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


def listed(overlay: Overlay, path: Any) -> list[Any] | None:
    """Return the names in a folder where a worker has changed something there, in the type of the path."""
    key = _folder(overlay, path)
    if key is None:
        return None
    names = overlay.names(key)
    return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names


def scanned(overlay: Overlay, path: Any) -> Entries | None:
    """Return the entries of a folder where a worker has changed something there."""
    key = _folder(overlay, path)
    if key is None:
        return None
    names = listed(overlay, path) or []
    given = os.fspath(path) if not isinstance(path, int) else ""
    return Entries(
        Entry(overlay, os.path.join(key, os.fsdecode(name)), name, os.path.join(given, name)) for name in names
    )


def _folder(overlay: Overlay, path: Any) -> str | None:
    """Return the resolved path of a folder that has changes; None where the caller's can be listed."""
    overlay.refresh()
    if not overlay.changes:
        return None
    key = folder_of(overlay, path) if isinstance(path, int) else overlay.key(os.fsdecode(path))
    if key is None or (overlay.changes.get(key) is None and _is_listed_as_it_is(overlay, path)):
        return None
    seen = overlay.seen(key)
    if seen is None:
        raise missing(path)
    if not stat.S_ISDIR(seen.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return key


def _is_listed_as_it_is(overlay: Overlay, path: Any) -> bool:
    return isinstance(path, int) or overlay.reading(path) is path


def folder_of(overlay: Overlay, descriptor: int) -> str | None:
    """Return the path that the worker knows an open folder by, or None."""
    try:
        return overlay.virtual(os.fsdecode(real.readlink(f"/proc/self/fd/{descriptor}")))
    except OSError:
        return _by_fcntl(overlay, descriptor)


def _by_fcntl(overlay: Overlay, descriptor: int) -> str | None:
    get_path = getattr(fcntl, "F_GETPATH", None)  # of macOS
    if get_path is None:
        return None
    return overlay.virtual(os.fsdecode(fcntl.fcntl(descriptor, get_path, bytes(1024)).rstrip(b"\0")))
