"""How a worker comes to a private copy of a file or a folder, before it changes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from nano_loop.distributed.files.changes import PRIVATE, SHOWN_THROUGH
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.overlay import Overlay, lower, missing

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TEMPORARY = getattr(os, "O_TMPFILE", 0)
_CLONE = 0x40049409  # FICLONE of Linux: the copy shares its blocks with the file
_CHUNK = 1 << 24


def open_file(overlay: Overlay, path: Any, flags: int, mode: int = 0o777) -> int:
    """Do what `os.open` does, to a private copy where the flags allow to write."""
    if not flags & _WRITING:
        with naming(path):
            return _opened(overlay.reading(path), flags, mode)
    key = overlay.key(os.fsdecode(path), not _of_the_link(flags))
    if overlay.is_shared(key):
        return _opened(path, flags, mode)
    with overlay.lock, naming(path):
        seen = overlay.seen(key)
        if seen is not None and not _can_be_copied(seen):
            return _opened(path, flags, mode)  # a device or a pipe
        new = flags & os.O_CREAT and flags & os.O_EXCL
        if new and seen is not None and not overlay.is_rank_0s(key, seen):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if seen is not None and stat.S_ISDIR(seen.st_mode):
            if _TEMPORARY and flags & _TEMPORARY == _TEMPORARY:
                return _opened(own_folder(overlay, key), flags, mode)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return _open_own(overlay, key, path, flags, mode, None if new else seen)


def _open_own(overlay: Overlay, key: str, path: Any, flags: int, mode: int, seen: os.stat_result | None) -> int:
    if seen is None and not flags & os.O_CREAT:
        raise missing(path)
    if seen is not None:
        if not flags & os.O_TRUNC:
            return _opened(own(overlay, key), flags, mode)
        mode, flags = stat.S_IMODE(seen.st_mode), flags | os.O_CREAT
    with replacing(overlay, key) as place:
        return _opened(place, flags, mode)


def _opened(place: Any, flags: int, mode: int) -> int:
    descriptor: int = real.open(place, flags, mode)
    return descriptor


def _of_the_link(flags: int) -> bool:
    return bool(flags & os.O_NOFOLLOW or (flags & os.O_CREAT and flags & os.O_EXCL))


def _can_be_copied(found: os.stat_result) -> bool:
    return stat.S_IFMT(found.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


@contextlib.contextmanager
def replacing(overlay: Overlay, key: str) -> Iterator[str]:
    """Give the place of a private file that is written anew in the body, whatever there was before."""
    with overlay.lock:
        place = os.path.join(own_folder(overlay, os.path.dirname(key)), os.path.basename(key))
    try:
        yield place
    finally:
        if lower(place) is not None:
            with overlay.lock:
                overlay.changes.set(key, PRIVATE)


class Access(Enum):
    """What is done to a file by a function that opens it by its path."""

    READ = auto()
    REPLACE = auto()
    EDIT = auto()


@contextlib.contextmanager
def accessed(overlay: Overlay, path: Any, access: Access) -> Iterator[Any]:
    """Give the path that a function is to open in the body instead of the one that the worker has given."""
    overlay.refresh()
    key = overlay.key(os.fsdecode(path))
    with naming(path):
        if access is Access.READ or overlay.is_shared(key):
            yield overlay.reading(path)
        elif access is Access.EDIT and overlay.seen(key) is not None:
            with overlay.lock:
                place = own(overlay, key)
            yield place
        else:
            with replacing(overlay, key) as place:
                yield place


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Let errors name the path that the worker has given, not that of the private copy."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


def own_folder(overlay: Overlay, key: str) -> str:
    """Return the place of private copies of what is in a folder, which must be there."""
    if key == "/":
        return overlay.root
    place = overlay.root + key
    if overlay.changes.get(key) in (PRIVATE, SHOWN_THROUGH):
        if not stat.S_ISDIR(real.stat(place).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
        return place
    seen = overlay.seen(key)
    if seen is None:
        raise missing(key)
    if not stat.S_ISDIR(seen.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
    own_folder(overlay, os.path.dirname(key))
    with contextlib.suppress(FileExistsError):  # by another process of this worker
        real.mkdir(place)
    real.chmod(place, stat.S_IMODE(seen.st_mode) | stat.S_IRWXU)
    overlay.changes.set(key, SHOWN_THROUGH)
    return place


def own(overlay: Overlay, key: str) -> str:
    """Return the place of a private copy of a file, a link or an empty folder; that of what cannot be copied itself."""
    if overlay.changes.get(key) == PRIVATE:
        return overlay.root + key
    seen = overlay.seen(key)
    if seen is None:
        raise missing(key)
    if not _can_be_copied(seen):
        return key
    if stat.S_ISDIR(seen.st_mode):
        place = own_folder(overlay, key)
    else:
        place = os.path.join(own_folder(overlay, os.path.dirname(key)), os.path.basename(key))
        _copy(key, place, seen)
    overlay.changes.set(key, PRIVATE)
    return place


def own_tree(overlay: Overlay, key: str) -> str:
    """Return the place of a private copy of a file or of a folder with all that is in it."""
    place = own(overlay, key)
    seen = overlay.seen(key)
    if seen is not None and stat.S_ISDIR(seen.st_mode):
        for name in overlay.names(key):
            own_tree(overlay, os.path.join(key, name))
    return place


def _copy(source: str, target: str, seen: os.stat_result) -> None:
    if stat.S_ISLNK(seen.st_mode):
        real.symlink(real.readlink(source), target)
        return
    incomplete = f"{target}.copy-{os.getpid()}"
    try:
        with real.open_file(source, "rb") as read, real.open_file(incomplete, "wb") as written:
            _copy_content(read, written)
        real.chmod(incomplete, stat.S_IMODE(seen.st_mode) | stat.S_IWUSR)
        real.utime(incomplete, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        real.rename(incomplete, target)
    except BaseException:
        with contextlib.suppress(OSError):
            real.unlink(incomplete)
        raise


def _copy_content(read: Any, written: Any) -> None:
    try:
        fcntl.ioctl(written.fileno(), _CLONE, read.fileno())
    except OSError:  # most file systems cannot
        while chunk := read.read(_CHUNK):
            written.write(chunk)
