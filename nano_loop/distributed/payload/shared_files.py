"""How memory is pickled: as buffers. Large ones are files that every process maps, or are mapped where they are."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from pickle import PickleBuffer
from types import TracebackType
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.comm.raw_bytes import memory_of
from nano_loop.distributed.comm.system_limits import limit_in_words
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.torch_private import bytes_of

Reduction = tuple[Any, ...]


def reduced(value: Any) -> Any:
    """Return what plain pickling makes of `value`."""
    return value.__reduce_ex__(5)


# --- storages ---


def reduce_storage(storage: torch.UntypedStorage, changing: bool) -> Reduction:
    """Pickle a storage as a buffer; one that is `changing` is loaded into private memory."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return _storage, (PickleBuffer(memory_of(whole)), changing)


def _storage(buffer: Any, changing: bool) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    # A small one comes as a bytearray, which is not aligned as torch aligns.
    return (view.clone() if changing or isinstance(buffer, bytearray) else view).untyped_storage()


def reduce_typed_storage(storage: torch.TypedStorage) -> Reduction | None:
    """Pickle a storage of another class by way of its bytes."""
    return _typed_storage, (bytes_of(storage), storage.dtype)


def typed_storages(arguments: Any) -> Any:
    """Wrap the bare storages that uint16 and float8 tensors are pickled by, and that only `torch.load` can rebuild."""
    if isinstance(arguments, torch.UntypedStorage):
        return _typed_storage(arguments, torch.uint8)
    return tuple(map(typed_storages, arguments)) if type(arguments) is tuple else arguments


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    with warnings.catch_warnings():  # the class is deprecated, and is what tensors are pickled by
        warnings.simplefilter("ignore")
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype)  # type: ignore[no-untyped-call]


# --- arrays ---


def reduce_array(array: np.ndarray[Any, Any]) -> Reduction | None:
    """Let a memory-mapped file be mapped again, and give arrays with gaps and of dates a buffer too."""
    if isinstance(array, np.memmap):
        return _reduce_memmap(array)
    if type(array) is not np.ndarray or array.dtype.hasobject:
        return None
    if array.dtype.kind in "mM":  # numpy gives no buffers of dates
        return np.ndarray.view, (array.view(np.int64), array.dtype)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return None
    copied = array.copy()
    copied.flags.writeable = array.flags.writeable
    return tuple(reduced(copied))


def _reduce_memmap(array: np.memmap[Any, Any]) -> Reduction:
    root: Any = array
    while isinstance(root.base, np.ndarray):  # a part of the file
        root = root.base
    if not isinstance(root, np.memmap) or root.mode == "c" or not root.filename or not os.path.exists(root.filename):
        return np.ndarray.view, (np.array(array), np.memmap)
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0] + root.offset
    place = (str(root.filename), root.nbytes + root.offset, start)
    return _memmap, (*place, array.shape, array.strides, array.dtype, array.flags.writeable)


def _memmap(path: str, size: int, start: int, shape: Any, strides: Any, dtype: Any, writable: bool) -> Any:
    """Map a file that this process may write to for itself alone: the file is the caller's."""
    whole = np.memmap(path, np.uint8, "c" if writable else "r", shape=(size,))
    array: Any = np.ndarray.__new__(np.memmap, shape, dtype, whole, start, strides)
    array.__array_finalize__(whole)  # the file's name, and what keeps it mapped
    return array


#: Bytes from which a buffer gets its own file.
LARGE = 2**20
#: The suffix of a file that says where the memory is.
ELSEWHERE = ".mapped"
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
            self._write_all(path.with_suffix(ELSEWHERE), memoryview(json.dumps(asdict(place)).encode()))
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
        elsewhere = path.with_suffix(ELSEWHERE)
        if elsewhere.exists():
            yield load_elsewhere(elsewhere)
            continue
        size = path.stat().st_size
        yield torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu").numpy()


def load_elsewhere(path: Path) -> np.ndarray[Any, Any]:
    """Return the bytes of a buffer of which a file, with the suffix `ELSEWHERE`, only says where they are."""
    array: np.ndarray[Any, Any] = Mapped(**json.loads(path.read_text())).load().numpy()
    return array


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
