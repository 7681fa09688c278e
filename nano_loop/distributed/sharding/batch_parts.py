"""Extracts a rank's samples from a batch that was loaded as a whole."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from nano_loop.distributed.comm.split_batches import Share
from nano_loop.errors import NanoError, error_message

_ARRAYS = (torch.Tensor, np.ndarray)
_SINGLE = (type(None), str, bytes, bool, int, float, complex, np.generic)
_EXPECTED = "split_batches splits tensors, arrays and lists along their first dimension, the batch"
_HINT = "Let collate_fn return such columns of equal length in tuples or dicts, or omit split_batches"


class BatchParts:
    """Splits the batches of one loader between `size` ranks.

    A list contains columns, if they fit. A nested list may also contain samples: if this is ambiguous, it is read as
    before.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._holds_samples = {"": False}  # by the path of a list in the batch

    def part(self, batch: Any, total: int | None) -> tuple[Share, Any]:
        """Return this rank's share of a batch of `total` samples (None: its first column's length), and its samples."""
        total = _length(batch) if total is None else total
        if total is None:
            raise _refusal(batch, "", "without a column of samples")
        share = Share.of(total, self._rank, self._size)
        part = batch if share.is_whole else self._part(batch, share, "")
        if part is None:
            raise _refusal(batch, "", f"without a column of {total} samples")
        return share, part

    def _part(self, value: Any, share: Share, place: str) -> Any:
        """Return this rank's part of the value at `place` in the batch, or None for data shared by all samples."""
        if isinstance(value, _SINGLE) or (isinstance(value, _ARRAYS) and not value.ndim):
            return None
        is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
        if not is_list and (count := _count(value)) is not None:
            if count != share.total:
                raise _refusal(value, place, f"of length {count}, but the batch has {share.total} samples")
            return _rows(value, share.start, share.stop)
        fields = _fields(value)
        if fields is None:
            raise _refusal(value, place, "of an unsupported type")
        may_hold_samples = is_list and len(value) == share.total
        try:
            parts = {key: self._part(field, share, f"{place}[{key!r}]") for key, field in fields.items()}
        except NanoError as error:
            if not may_hold_samples or isinstance(error, _OpenError):
                raise
            parts = {}
        parts = {key: part for key, part in parts.items() if part is not None}
        if is_list and may_hold_samples is not bool(parts):  # contradictory or unclear
            self._holds_samples.setdefault(place, may_hold_samples)
        elif is_list and value and (not parts or place not in self._holds_samples):
            why = f"of length {len(value)}, which may or may not be columns of {share.total} samples"
            raise _refusal(value, place, why, _OpenError if parts else NanoError)
        if may_hold_samples and (not parts or self._holds_samples[place]):
            return value[share.start : share.stop]
        return _with(value, parts) if parts else None


class _OpenError(NanoError):
    """A list can be read in two ways."""


def _refusal(value: Any, place: str, why: str, kind: type[NanoError] = NanoError) -> NanoError:
    return kind(error_message(f"a {type(value).__name__} at batch{place} {why}", _EXPECTED, _HINT))


def _count(value: Any) -> int | None:
    """Return the number of samples in a column, or None for other values."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, _ARRAYS):
        return int(value.shape[0]) if isinstance(value, np.ndarray) else value.size(0)
    return int(value.num_graphs) if hasattr(type(value), "from_data_list") else None  # a batch of PyG graphs


def _length(value: Any) -> int | None:
    """Return the number of samples in the first column."""
    if isinstance(value, _SINGLE) or (isinstance(value, _ARRAYS) and not value.ndim):
        return None
    if (count := _count(value)) is not None:
        return count
    counts = map(_length, (_fields(value) or {}).values())
    return next((count for count in counts if count is not None), None)


def _rows(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, PackedSequence):
        return pack_sequence(unpack_sequence(value)[start:stop], enforce_sorted=value.sorted_indices is None)
    if isinstance(value, torch.Tensor) and value.is_nested:
        return torch.nested.as_nested_tensor([*value.unbind()][start:stop], layout=value.layout)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return torch.narrow_copy(value, 0, start, stop - start)
    if isinstance(value, _ARRAYS):
        return value[start:stop]
    return type(value).from_data_list(value.to_data_list()[start:stop])


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the fields of a container, such as a class with ``pin_memory``, which torch's loaders call on batches."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return value._asdict() if hasattr(value, "_asdict") else dict(enumerate(value))
    return vars(value) if dataclasses.is_dataclass(value) or hasattr(value, "pin_memory") else None


def _with(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a container with some fields replaced."""
    if hasattr(value, "_replace"):
        return value._replace(**parts)
    if isinstance(value, (list, tuple)):
        items = [parts.get(number, item) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    copied = copy.copy(value)
    (copied if isinstance(value, Mapping) else vars(copied)).update(parts)
    return copied
