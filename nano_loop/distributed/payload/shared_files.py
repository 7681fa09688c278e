"""Files in a private shared-memory folder: how large buffers are written once, and mapped by every process."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleBuffer
from types import TracebackType
from typing import Any

import torch

from nano_loop.errors import NanoError, problem

#: Bytes from which a buffer gets its own file.
LARGE = 2**20


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
        By `write` and `take`, if the folder has no room or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = shutil.disk_usage(folder).free
        self._written = 0
        self._numbers = itertools.count()
        self._payload = (folder / "payload").open("wb", buffering=0)

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
        with (self._folder / str(next(self._numbers))).open("wb", buffering=0) as file:
            self._write(file, view)
        return False

    def _write(self, file: Any, view: memoryview) -> int:
        rest = view
        try:
            while rest:  # one call writes 2 GiB at the most
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise NanoError(self._no_room(view.nbytes, error)) from error
        self._written += view.nbytes
        return view.nbytes

    def _no_room(self, size: int, error: OSError) -> str:
        needed = f"the arguments of the call need at least {self._written + size:,} bytes in {self._folder}"
        allowed = "they are sent to the worker processes through files in shared memory"
        advice = "Enlarge that file system (docker: --shm-size), or set TMPDIR to a folder that has room"
        return problem(f"{needed}, and {self._free:,} bytes were free there ({error.strerror})", allowed, advice)


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
        size = path.stat().st_size
        yield torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu").numpy()
