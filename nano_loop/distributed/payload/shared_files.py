"""Files in a private shared-memory folder: how large buffers are written once, and mapped by every process.

Memory of this process that others can map already is not written: shared mappings of files, of memory or of a disk.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from pickle import PickleBuffer
from types import TracebackType
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.comm.system_limits import limit_in_words
from nano_loop.errors import NanoError, error_message

#: Bytes from which a buffer gets its own file.
LARGE = 2**20
_ELSEWHERE = ".mapped"  # of a file that says where the memory is
_ROW_PARTS = 6  # of /proc/self/maps: addresses, permissions, offset, device, inode, path


class SharedFiles:
    """Writes a payload and the large buffers beside it.

    Everything is written with `write(2)`, which fails if the folder is full; a store into a mapping would end the
    process by SIGBUS.

    Parameters
    ----------
    folder : Path
        An existing, empty folder.

    Raises
    ------
    NanoError
        Also by `write` and `take`, if the folder has no room or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = shutil.disk_usage(folder).free
        #: Bytes of large buffers that were written; the rest of them is mapped where it is.
        self.copied = 0
        self._numbers = itertools.count()
        self._payload = self._opened(folder / "payload", 0)

    def __enter__(self) -> SharedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._payload.close()

    def write(self, data: Any) -> int:
        """Append to the payload; this is what makes the object a file for a pickler."""
        return self._write(self._payload, PickleBuffer(data).raw())

    def take(self, buffer: PickleBuffer) -> bool:
        """Write a large buffer to its own file; True means that the pickler keeps it in the payload."""
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        path = self._folder / str(next(self._numbers))
        place = mapped(np.frombuffer(view, np.uint8).ctypes.data, view.nbytes)
        if place is not None:  # others can map it where it is
            self._write_all(path.with_suffix(_ELSEWHERE), memoryview(json.dumps(asdict(place)).encode()))
            return False
        self._write_all(path, view)
        self.copied += view.nbytes
        return False

    def _write_all(self, path: Path, view: memoryview) -> None:
        with self._opened(path, view.nbytes) as file:
            self._write(file, view)

    def _opened(self, path: Path, size: int) -> FileIO:
        try:
            return path.open("wb", buffering=0)
        except OSError as error:
            raise NanoError(self._no_room(size, error)) from error

    def _write(self, file: Any, view: memoryview) -> int:
        rest = view
        try:
            while rest:  # one call writes 2 GiB at the most
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise NanoError(self._no_room(view.nbytes, error)) from error
        return view.nbytes

    def _no_room(self, size: int, error: OSError) -> str:
        got = f"the arguments of the call need at least {self.copied + size:,} bytes in {self._folder}"
        other = "they are sent to the worker processes through files there", "Check that file system"
        words = limit_in_words(error, self._folder) or other
        return error_message(f"{got}, and {self._free:,} bytes were free there ({error.strerror})", *words)


def mapped_buffers(folder: Path) -> Iterator[Any]:
    """Map the files of the large buffers, in the order in which they were written.

    Yields
    ------
    numpy.ndarray
        uint8, writable. A page is shared with all who map the file until it is written to, and is this process's own
        from then on. No file descriptor stays open (`mmap.mmap` would keep one), and the file may be unlinked.
    """
    for number in itertools.count():
        path = folder / str(number)
        elsewhere = path.with_suffix(_ELSEWHERE)
        if elsewhere.exists():
            yield whole_buffer(elsewhere)[1]
            continue
        size = path.stat().st_size
        yield torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu").numpy()


def whole_buffer(path: Path) -> tuple[bool, np.ndarray[Any, Any]]:
    """Return whether a file only says where the memory of a buffer is, and the bytes of the buffer, or of the file.

    Parameters
    ----------
    path : Path
        One of the files that `SharedFiles` has written.

    Returns
    -------
    bool, numpy.ndarray
        The array is uint8.
    """
    if path.suffix == _ELSEWHERE:
        return True, Mapped(**json.loads(path.read_text())).load().numpy()
    return False, np.fromfile(path, np.uint8)


# --- memory that others can map where it is ---


@dataclass(frozen=True)
class Mapped:
    """A range of a file that another process of this user can open, as long as this one has it mapped.

    Parameters
    ----------
    path : str
        The file's; of one without a name, that of a descriptor of this process.
    start, size : int
        The range, in bytes.
    device, inode : int
        Which file it is.
    """

    path: str
    start: int
    size: int
    device: int
    inode: int

    def load(self) -> torch.Tensor:
        """Map the range, for this process alone where it writes; a NanoError if the file is not there any more."""
        size = self.start + self.size
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise NanoError(self._lost(str(error))) from error
        if (status.st_dev, status.st_ino) != (self.device, self.inode) or status.st_size < size:
            raise NanoError(self._lost("it is another file, or shorter"))
        return torch.from_file(self.path, shared=False, size=size, dtype=torch.uint8, device="cpu")[self.start :]

    def _lost(self, why: str) -> str:
        got = f"an argument has its memory in {self.path}, which this process cannot map ({why})"
        hint = "Keep the file unchanged until the run has started, or pass a copy (tensor.clone(), array.copy())"
        return error_message(got, "memory that is shared with a file is mapped, not copied", hint)


def mapped(address: int, size: int) -> Mapped | None:
    """Return the file behind a range of this process's memory; None if it is not shared with a file's.

    Pages of a private mapping may have been written to, and are then this process's alone.
    """
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/maps") as rows:
        for row in rows:
            parts = row.split(maxsplit=_ROW_PARTS - 1)
            first, last = (int(end, 16) for end in parts[0].split("-"))
            if first <= address and address + size <= last:
                return _file(parts, address - first, size) if parts[1].endswith("s") else None
    return None


def _file(parts: list[str], offset: int, size: int) -> Mapped | None:
    device = os.makedev(*(int(part, 16) for part in parts[3].split(":")))
    inode = int(parts[4])
    name = parts[5].rstrip("\n") if len(parts) == _ROW_PARTS else ""
    for path in [name, *_descriptors()]:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if status.st_ino == inode and (status.st_dev == device or path != name):
            return Mapped(path, int(parts[2], 16) + offset, size, status.st_dev, inode)
    return None


def _descriptors() -> list[str]:
    """Return the paths by which other processes open this one's files; one that is open may have no other name."""
    folder = Path(f"/proc/{os.getpid()}/fd")
    return [str(folder / name) for name in os.listdir(folder)]
