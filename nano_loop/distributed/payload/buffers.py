"""How memory is pickled: a torch storage or a numpy array as one buffer, and a mapped file as its name."""

from __future__ import annotations

import os
import warnings
from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.comm.raw_bytes import memory_of
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
