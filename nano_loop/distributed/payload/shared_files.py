"""Pickling of memory as out-of-band buffers, with large ones in files that every process maps."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.comm.raw_bytes import memory_of
from nano_loop.distributed.comm.system_limits import limit_in_words
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import bytes_of

Reduction = tuple[Any, ...]


def reduced(value: Any) -> Any:
    """Return the standard reduction of `value`."""
    return value.__reduce_ex__(5)


# --- storages ---


def reduce_storage(storage: torch.UntypedStorage, changing: bool) -> Reduction:
    """Pickle a storage as a buffer; a `changing` one is loaded into private memory."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return _storage, (PickleBuffer(memory_of(whole)), changing)


def _storage(buffer: Any, changing: bool) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    # A small buffer arrives as a bytearray, which lacks torch's alignment.
    return (view.clone() if changing or isinstance(buffer, bytearray) else view).untyped_storage()


def reduce_typed_storage(storage: torch.TypedStorage) -> Reduction | None:
    """Pickle a storage of another class by its bytes."""
    return _typed_storage, (bytes_of(storage), storage.dtype)


def typed_storages(arguments: Any) -> Any:
    """Wrap the bare storages of pickled uint16 and float8 tensors, which only `torch.load` can otherwise rebuild."""
    if isinstance(arguments, torch.UntypedStorage):
        return _typed_storage(arguments, torch.uint8)
    return tuple(map(typed_storages, arguments)) if type(arguments) is tuple else arguments


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    with warnings.catch_warnings():  # the class is deprecated, but tensors are pickled by it
        warnings.simplefilter("ignore")
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype)  # type: ignore[no-untyped-call]


# --- arrays ---


def reduce_array(array: np.ndarray[Any, Any]) -> Reduction | None:
    """Map memory-mapped files again, and also pickle non-contiguous arrays and dates as buffers."""
    if isinstance(array, np.memmap):
        return _reduce_memmap(array)
    if type(array) is not np.ndarray or array.dtype.hasobject:
        return None
    if array.dtype.kind in "mM":  # numpy does not provide buffers of dates
        return np.ndarray.view, (array.view(np.int64), array.dtype)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return None
    copied = array.copy()
    copied.flags.writeable = array.flags.writeable
    return tuple(reduced(copied))


def _reduce_memmap(array: np.memmap[Any, Any]) -> Reduction:
    root: Any = array
    while isinstance(root.base, np.ndarray):  # a view of a part of the file
        root = root.base
    if not isinstance(root, np.memmap) or root.mode == "c" or not root.filename or not os.path.exists(root.filename):
        return np.ndarray.view, (np.array(array), np.memmap)
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0] + root.offset
    place = (str(root.filename), root.nbytes + root.offset, start)
    return _memmap, (*place, array.shape, array.strides, array.dtype, array.flags.writeable)


def _memmap(path: str, size: int, start: int, shape: Any, strides: Any, dtype: Any, writable: bool) -> Any:
    """Map a file of the caller's copy-on-write, so that this process's writes stay private."""
    whole = np.memmap(path, np.uint8, "c" if writable else "r", shape=(size,))
    array: Any = np.ndarray.__new__(np.memmap, shape, dtype, whole, start, strides)
    array.__array_finalize__(whole)  # the file's name, and the reference that keeps it mapped
    return array


#: The size in bytes from which a buffer gets its own file.
LARGE = 2**20


class SharedFiles:
    """Writes a payload, and its large buffers to separate files, in an existing, empty folder.

    `write(2)` returns an error if the folder is full; writing to a mapping would end the process by SIGBUS.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = shutil.disk_usage(folder).free
        #: The number of bytes of large buffers written.
        self.copied = 0
        self._numbers = itertools.count()
        self._payload = self._opened(folder / "payload", 0)

    def close(self) -> None:
        """Close the payload."""
        self._payload.close()

    def write(self, data: Any) -> int:
        """Append to the payload; implements the file interface for a pickler."""
        return self._write(self._payload, PickleBuffer(data).raw())

    def take(self, buffer: PickleBuffer) -> bool:
        """Write a large buffer to its own file; return True to keep the buffer in the payload."""
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        with self._opened(self._folder / str(next(self._numbers)), view.nbytes) as file:
            self._write(file, view)
        self.copied += view.nbytes
        return False

    def _opened(self, path: Path, size: int) -> FileIO:
        try:
            return path.open("wb", buffering=0)
        except OSError as error:
            raise NanoError(self._no_room(size, error)) from error

    def _write(self, file: Any, view: memoryview) -> int:
        rest = view
        try:
            while rest:  # one call writes at most 2 GiB
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
    """Map the files of the large buffers in order, copy-on-write; `mmap.mmap` would keep a descriptor of each."""
    for number in itertools.count():
        path = folder / str(number)
        size = path.stat().st_size
        yield torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu").numpy()
