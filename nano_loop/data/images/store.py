"""A folder of entries that several processes write and read, with one file per entry, written atomically.

An entry is written to a temporary file, which is then renamed. So a process that is killed in between does not leave a
partial entry. A checksum detects data that a disk has lost. An image that is read back has everything that a transform
may read.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import functools
import os
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nano_loop.errors import NanoError
from nano_loop.storage.trusted_files import open_file

_MAGIC = b"nano_loop image 2"
_SUM = struct.Struct(f"<{len(_MAGIC)}sI")  # the magic, and the checksum of the rest
_HEAD = struct.Struct("<40siiBI")  # the key, height, width and channels, the bytes of the metadata
_MODES = {1: "L", 3: "RGB"}
_LONGEST_INFO = 1 << 16
_PLAIN = (bool, int, float, str, bytes, type(None))


class ImageEntry(NamedTuple):
    """An image in the cache."""

    pixels: np.ndarray[Any, Any]  # bytes, of shape (H, W, C)
    info: str  # the `repr` of Pillow's metadata

    def image(self) -> Image.Image:
        """Return the Pillow image."""
        height, width, channels = self.pixels.shape
        image = Image.frombytes(_MODES[channels], (width, height), self.pixels.data)
        image.info = _read_info(self.info).copy()
        return image

    def packed(self, key: str) -> tuple[bytes, np.ndarray[Any, Any]]:
        """Return the bytes of a file in two parts. The second part is the pixels."""
        info = self.info.encode()
        head = _HEAD.pack(key.encode(), *self.pixels.shape, len(info)) + info
        return _SUM.pack(_MAGIC, zlib.crc32(self.pixels.data, zlib.crc32(head))) + head, self.pixels


def entry_of(image: Any) -> ImageEntry | None:
    """Return the entry for an image, or None if it could not be read back exactly."""
    if type(image) is not Image.Image or image.mode not in _MODES.values():
        return None
    info = repr(image.info)
    if len(info) > _LONGEST_INFO or not all(map(_is_literal, (*image.info.keys(), *image.info.values()))):
        return None
    return ImageEntry(np.asarray(image).reshape(image.height, image.width, len(image.getbands())), info)


def unpacked(data: memoryview, key: str, check: bool) -> ImageEntry | None:
    """Return the entry in a file's bytes; None, or any exception, if they are damaged, or None for another key."""
    rest = data[_SUM.size :]
    if len(rest) < _HEAD.size:
        return None
    magic, total = _SUM.unpack(data[: _SUM.size])
    its_key, height, width, channels, length = _HEAD.unpack(rest[: _HEAD.size])
    pixels = rest[_HEAD.size + length :]
    if (magic, its_key) != (_MAGIC, key.encode()) or channels not in _MODES or len(pixels) != height * width * channels:
        return None
    if check and zlib.crc32(rest) != total:
        return None
    info = bytes(rest[_HEAD.size :][:length]).decode()
    _read_info(info)
    return ImageEntry(np.frombuffer(pixels, np.uint8).reshape(height, width, channels), info)


def _is_literal(value: Any) -> bool:
    """Whether `ast.literal_eval` can read back the `repr` of a part of an image's metadata."""
    if type(value) is tuple:  # not a list, which is mutable
        return all(map(_is_literal, value))
    # The repr of nan and inf is not a literal.
    return type(value) in _PLAIN and not (type(value) is float and value - value != 0)


@functools.lru_cache(maxsize=64)
def _read_info(text: str) -> dict[Any, Any]:
    return dict[Any, Any](ast.literal_eval(text).items())


_USED = struct.Struct("<QQ")  # bytes and entries
_UNFINISHED = "unfinished-"
_ABANDONED = 3600.0  # seconds after which an unfinished entry is abandoned
_PAGE = 4096
_LARGEST = 1 << 30  # bytes of an entry; Pillow does not open larger images
_LONGEST_NOTES = 100_000
_MOST = 1 << 62  # maximum bytes in a folder


class Usage(NamedTuple):
    """The usage of a cache."""

    size: int  # bytes on the disk or in memory
    entries: int  # the number of images


class Store:
    """The entries of an existing folder, up to a limit of bytes of all processes, with or without checksums."""

    def __init__(self, folder: Path, limit: int | None, sums: bool) -> None:
        self.folder = folder
        self.limit = limit
        self.sums = sums
        self._is_closed = False  # whether this process has stopped writing
        self._notes: set[str] = set()

    def allow(self, limit: int) -> None:
        """Set the limit."""
        self.limit = limit
        self._is_closed = False

    def get(self, key: str) -> ImageEntry | None:
        """Return a copy of an entry; None if it is missing or damaged."""
        path, entry = self._path(key), None
        try:
            with open(open_file(path), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                data = bytearray(size if size <= _LARGEST else 0)
                if file.readinto(data) == size:
                    entry = unpacked(memoryview(data), key, self.sums)
        except OSError:
            return None
        except Exception:  # not a file, another user's, or with an unreadable header
            entry = None
        if entry is None:
            self.note("damaged entries of the cache were replaced")
            with contextlib.suppress(OSError):
                os.unlink(path)
        return entry

    def put(self, key: str, entry: ImageEntry) -> None:
        """Write an entry, unless it exists, the limit is reached, or the folder is not writable."""
        head, pixels = entry.packed(key)
        size = -(-(len(head) + pixels.nbytes) // _PAGE) * _PAGE
        if self._is_closed or size > _LARGEST or os.path.exists(self._path(key)) or not self._count(size):
            return
        try:
            self._write(self._path(key), [head, pixels.data])
        except OSError as error:
            self._close(error)

    def note(self, text: str) -> None:
        """Add a line for the report, unless it was already added."""
        if text not in self._notes:
            self._notes.add(text)
            with contextlib.suppress(OSError, NanoError), self._open("notes", os.O_CREAT | os.O_APPEND) as file:
                file.write(f"{text}\n".encode())

    def notes(self) -> list[str]:
        """Return and remove the lines that all processes have added."""
        notes = set(self._notes)
        self._notes.clear()
        with contextlib.suppress(OSError, NanoError, UnicodeDecodeError):
            with self._open("notes") as file:
                notes.update(file.read(_LONGEST_NOTES).decode().splitlines())
            os.unlink(self.folder / "notes")
        return sorted(notes)

    def usage(self) -> Usage:
        """Return the usage by all processes."""
        try:
            with self._open("used") as file:
                return _read_usage(file)
        except (OSError, NanoError):
            return Usage(0, 0)

    def tidy(self) -> None:
        """Delete temporary files of processes that were killed while writing."""
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
        """Count an entry against the limit, and return whether it fits."""
        try:
            with self._open("used", os.O_CREAT) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                used = _read_usage(file)
                if self.limit is not None and used.size + size > self.limit:
                    self._is_closed = True
                    return False
                file.seek(0)
                file.write(_USED.pack(used.size + size, used.entries + 1))
                file.truncate()  # a damaged file may be longer
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
    """Read the usage; damaged numbers count as zero."""
    data = file.read(_USED.size + 1)
    usage = Usage(*_USED.unpack(data)) if len(data) == _USED.size else Usage(0, 0)
    return usage if max(usage) < _MOST else Usage(0, 0)
