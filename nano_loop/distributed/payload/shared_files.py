"""Files in a private shared-memory folder: how large buffers are written once, and mapped by every process."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from pickle import PickleBuffer
from types import TracebackType
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.comm.limits import limit_in_words
from nano_loop.distributed.payload.mapped_memory import Mapped, mapped
from nano_loop.errors import NanoError, error_message

#: Bytes from which a buffer gets its own file.
LARGE = 2**20
_ELSEWHERE = ".mapped"  # of a file that says where the memory is


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
