"""Private names of torch's data loaders, each with the reason for its use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate as _module
from torch.utils.data._utils.collate import collate_numpy_array_fn, collate_tensor_fn, default_collate_fn_map

_KEPT_ITERATOR = "_iterator"


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with ``persistent_workers`` keeps between epochs, or None."""
    return vars(loader).get(_KEPT_ITERATOR)


def with_iterator(attributes: dict[str, Any], iterator: Any = None) -> dict[str, Any]:
    """Return a loader's attributes with another kept iterator for a copy; None makes the copy start its own workers."""
    return {**attributes, _KEPT_ITERATOR: iterator}


def stop_kept_workers(loader: DataLoader[Any]) -> None:
    """Stop the worker processes that a loader keeps between epochs, even if a traceback still references them."""
    iterator = kept_iterator(loader)
    vars(loader)[_KEPT_ITERATOR] = None
    if iterator is not None:
        iterator._shutdown_workers()  # as when the iterator is garbage-collected


def default_collate_by(batch: Sequence[Any], of_arrays: Callable[[Sequence[Any]], torch.Tensor | None]) -> Any:
    """Return what `default_collate` returns, but try `of_arrays` first unless the user has registered functions."""
    functions: dict[Any, Any] = dict(default_collate_fn_map)
    if (functions.get(np.ndarray), functions.get(torch.Tensor)) == (collate_numpy_array_fn, collate_tensor_fn):

        def collate_arrays(arrays: Sequence[Any], *, collate_fn_map: Any) -> Any:
            stacked = of_arrays(arrays)
            return collate_numpy_array_fn(arrays, collate_fn_map=collate_fn_map) if stacked is None else stacked

        functions[np.ndarray] = collate_arrays
    return _module.collate(batch, collate_fn_map=functions)


def collates_as_torch() -> bool:
    """Whether `default_collate` currently behaves as in torch: the program has registered no function with it."""
    return {function.__module__ for function in default_collate_fn_map.values()} == {_module.__name__}


def shared_storage(size: int) -> torch.UntypedStorage:
    """Allocate shared memory of this size in bytes, like the memory that a loader's worker collates batches into.

    The public `share_memory_` copies the existing data, and there is no data yet.
    """
    return torch.UntypedStorage._new_shared(size)  # type: ignore[no-any-return, no-untyped-call]
