"""A folder of entries that several processes write and read: one file for each, which appears when it is whole.

An entry is written to a file of another name, which then gets its own. So a process that is killed in between leaves no
half of an entry. A sum over the bytes finds what a disk has lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from nano_loop.data.images.entries import ImageEntry, unpacked
from nano_loop.errors import NanoError
from nano_loop.storage.trusted_files import open_file

_USED = struct.Struct("<QQ")  # bytes and entries
_UNFINISHED = "unfinished-"
_ABANDONED = 3600.0  # seconds after which nobody is writing an unfinished entry
_PAGE = 4096
_LARGEST = 1 << 30  # bytes of an entry; Pillow opens no image that is larger
_LONGEST_NOTES = 100_000
_MOST = 1 << 62  # bytes in a folder


class Usage(NamedTuple):
    """What a cache holds."""

    size: int  # bytes on the disk or in memory
    entries: int  # the number of images


class Store:
    """The entries of a folder.

    Parameters
    ----------
    folder : pathlib.Path
        An existing folder, to which this process may write or not.
    limit : int or None
        The bytes that the entries of all processes may take; None: as many as the disk has room for.
    sums : bool
        Whether to check the sum of an entry when it is read.
    """

    def __init__(self, folder: Path, limit: int | None, sums: bool) -> None:
        self.folder = folder
        self.limit = limit
        self.sums = sums
        self._is_closed = False  # for writing, by this process
        self._notes: set[str] = set()

    def allow(self, limit: int) -> None:
        """Set the limit anew."""
        self.limit = limit
        self._is_closed = False

    def get(self, key: str) -> ImageEntry | None:
        """Return an entry, in memory of the caller's; None if it is missing or damaged."""
        path, entry = self._path(key), None
        try:
            with open(open_file(path), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                data = bytearray(size if size <= _LARGEST else 0)
                if file.readinto(data) == size:
                    entry = unpacked(memoryview(data), key, self.sums)
        except OSError:
            return None
        except Exception:  # it is no file, another user's, or has a header that cannot be read
            entry = None
        if entry is None:
            self.note("damaged entries of the cache were made anew")
            with contextlib.suppress(OSError):
                os.unlink(path)
        return entry

    def put(self, key: str, entry: ImageEntry) -> None:
        """Write an entry, unless the limit is reached, the folder cannot be written, or it is there."""
        head, pixels = entry.packed(key)
        size = -(-(len(head) + pixels.nbytes) // _PAGE) * _PAGE
        if self._is_closed or size > _LARGEST or os.path.exists(self._path(key)) or not self._count(size):
            return
        try:
            self._write(self._path(key), [head, pixels.data])
        except OSError as error:
            self._close(error)

    def note(self, text: str) -> None:
        """Keep a line for the report. The same line is kept once."""
        if text not in self._notes:
            self._notes.add(text)
            with contextlib.suppress(OSError, NanoError), self._open("notes", os.O_CREAT | os.O_APPEND) as file:
                file.write(f"{text}\n".encode())

    def notes(self) -> list[str]:
        """Return the lines that all processes have kept, and forget them."""
        notes = set(self._notes)
        self._notes.clear()
        with contextlib.suppress(OSError, NanoError, UnicodeDecodeError):
            with self._open("notes") as file:
                notes.update(file.read(_LONGEST_NOTES).decode().splitlines())
            os.unlink(self.folder / "notes")
        return sorted(notes)

    def usage(self) -> Usage:
        """Return what all processes have written."""
        try:
            with self._open("used") as file:
                return _read_usage(file)
        except (OSError, NanoError):
            return Usage(0, 0)

    def tidy(self) -> None:
        """Delete what processes that were killed while they wrote have left."""
        for path in self.folder.glob(f"??/{_UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key[:2], key[2:])

    def _write(self, path: str, pieces: list[Any]) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.writelines(pieces)
            os.rename(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    def _count(self, size: int) -> bool:
        """Count an entry against the limit, and return whether there is room."""
        try:
            with self._open("used", os.O_CREAT) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                used = _read_usage(file)
                if self.limit is not None and used.size + size > self.limit:
                    self._is_closed = True
                    return False
                file.seek(0)
                file.write(_USED.pack(used.size + size, used.entries + 1))
                file.truncate()  # a damaged one may be longer
        except (OSError, NanoError) as error:
            self._close(error)
            return False
        return True

    def _open(self, name: str, flags: int = 0) -> Any:
        return open(open_file(os.path.join(self.folder, name), flags=os.O_RDWR | flags), "r+b", buffering=0)

    def _close(self, error: OSError | NanoError) -> None:
        self._is_closed = True
        number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        self.note(
            f"the cache cannot be written any further: {words or error} {errno.errorcode.get(number or 0, '')}".strip()
        )


def _read_usage(file: Any) -> Usage:
    """Read how much is used; a damaged number counts as none."""
    data = file.read(_USED.size + 1)
    usage = Usage(*_USED.unpack(data)) if len(data) == _USED.size else Usage(0, 0)
    return usage if max(usage) < _MOST else Usage(0, 0)
