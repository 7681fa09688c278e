"""A folder of entries that several processes write and read: one file for each, which appears when it is whole.

An entry is written to a file of another name, which then gets its own. So a process that is killed in between leaves no
half of an entry. A sum over the bytes finds what a disk has lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from nano_loop.errors import NanoError
from nano_loop.images.entries import fits
from nano_loop.storage.trusted_files import open_file

_MAGIC = b"nano_loop image 1"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sIQI")  # the magic, the bytes of the header and of the pixels, the sum
_USED = struct.Struct("<QQ")  # bytes and entries
_UNFINISHED = "unfinished-"
_ABANDONED = 3600.0  # seconds after which nobody is writing an unfinished entry
_PAGE = 4096
_LARGEST = 1 << 30  # bytes of an entry; Pillow opens no image that is larger
_LONGEST_NOTE = 10_000
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
        self._numbers = itertools.count()

    def allow(self, limit: int) -> None:
        """Set the limit anew."""
        self.limit = limit
        self._is_closed = False

    def __contains__(self, key: str) -> bool:
        return os.path.exists(self._path(key))

    def get(self, key: str) -> tuple[dict[str, Any], memoryview] | None:
        """Return the header and the pixels of an entry, in memory of the caller's; None if it is missing or damaged."""
        path = self._path(key)
        try:
            with open(open_file(path), "rb", buffering=0) as file:
                data = bytearray(min(os.fstat(file.fileno()).st_size, _LARGEST))
                length = file.readinto(data)
        except OSError:
            return None
        except NanoError:  # it is no file, or another user's
            data, length = bytearray(), 0
        entry = _parsed(memoryview(data), key, self.sums) if length == len(data) else None
        if entry is None:
            self.note("damaged entries of the cache were made anew")
            with contextlib.suppress(OSError):
                os.unlink(path)
        return entry

    def put(self, key: str, header: dict[str, Any], pixels: bytes | memoryview) -> None:
        """Write an entry, unless the limit is reached, the folder cannot be written, or another process has made it."""
        if self._is_closed:
            return
        text = json.dumps({**header, "key": key}).encode()
        size = _HEAD.size + len(text) + len(pixels)
        size = -(-size // _PAGE) * _PAGE
        if size > _LARGEST or not self._count(size, 1):
            return
        total = zlib.crc32(pixels, zlib.crc32(text)) if self.sums else 0
        try:
            self._write(key, [_HEAD.pack(_MAGIC, len(text), len(pixels), total), text, pixels])
        except FileExistsError:  # another process has made the same entry meanwhile
            self._count(-size, -1)
        except OSError as error:
            self._close(error)

    def note(self, text: str) -> None:
        """Keep a line for the report. The same line is kept once."""
        if text in self._notes:
            return
        self._notes.add(text)
        name = f"note-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        with contextlib.suppress(OSError, NanoError), self._opened(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            file.write(text.encode())

    def notes(self) -> list[str]:
        """Return the lines that all processes have kept, and forget them."""
        notes = set(self._notes)
        for path in self.folder.glob("note-*"):
            with contextlib.suppress(OSError, NanoError, UnicodeDecodeError):
                with self._opened(path.name, os.O_RDWR) as file:
                    notes.add(file.read(_LONGEST_NOTE).decode())
                path.unlink()
        self._notes.clear()
        return sorted(notes)

    def usage(self) -> Usage:
        """Return what all processes have written."""
        try:
            with self._opened("used", os.O_RDWR) as file:
                return _unpacked(file)
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

    def _write(self, key: str, pieces: list[bytes | memoryview]) -> None:
        path = self._path(key)
        unfinished = os.path.join(os.path.dirname(path), f"{_UNFINISHED}{os.getpid()}-{next(self._numbers)}")
        try:
            with os.fdopen(_opened(unfinished), "wb") as file:
                file.writelines(pieces)
            _appear(unfinished, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)

    def _count(self, size: int, entries: int) -> bool:
        """Count bytes and entries against the limit, and return whether there is room."""
        try:
            with self._opened("used", os.O_RDWR | os.O_CREAT) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                used = _unpacked(file)
                if self.limit is not None and used.size + size > self.limit:
                    self._is_closed = True
                    return False
                left = max(used.size + size, 0), max(used.entries + entries, 0)
                file.seek(0)
                file.write(_USED.pack(*left))
                file.truncate()  # a damaged one may be longer
        except (OSError, NanoError) as error:
            self._close(error)
            return False
        return True

    def _opened(self, name: str, flags: int) -> Any:
        return open(open_file(os.path.join(self.folder, name), flags=flags), "r+b", buffering=0)

    def _close(self, error: OSError | NanoError) -> None:
        self._is_closed = True
        number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        self.note(
            f"the cache cannot be written any further: {words or error} {errno.errorcode.get(number or 0, '')}".strip()
        )


def _appear(unfinished: str, path: str) -> None:
    """Give a finished entry its name; raise `FileExistsError` if another one has it."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.rename(unfinished, path)


def _opened(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def _unpacked(file: Any) -> Usage:
    """Read how much is used; a damaged number counts as none."""
    data = file.read(_USED.size + 1)
    usage = Usage(*_USED.unpack(data)) if len(data) == _USED.size else Usage(0, 0)
    return usage if max(usage) < _MOST else Usage(0, 0)


def _parsed(data: memoryview, key: str, sums: bool) -> tuple[dict[str, Any], memoryview] | None:
    if len(data) < _HEAD.size:
        return None
    magic, length, size, total = _HEAD.unpack(data[: _HEAD.size])
    text, pixels = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
    if magic != _MAGIC or len(pixels) != size or (sums and zlib.crc32(pixels, zlib.crc32(text)) != total):
        return None
    try:
        header: dict[str, Any] = json.loads(bytes(text))
    except (ValueError, RecursionError):
        return None
    return (header, pixels) if fits(header, len(pixels)) and header.get("key") == key else None
