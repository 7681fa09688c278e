"""Takes batches from datasets in memory by one indexing operation per tensor or array.

A `DataLoader` indexes each sample separately and stacks the samples, which takes six times as long. The result is the
same as that of `torch.utils.data.default_collate`. Datasets are recognized by their exact classes, of torch and of
skorch, or by a ``__getitem__`` that only indexes tensors and arrays: ``return self.x[index], self.y[index]``. This is
checked in its bytecode: it may only load attributes, index, and build tuples, lists and dicts. Such code has no
branches, calls or side effects, so one call with placeholders for the dataset and the index shows the structure of all
samples. Other kinds of tables, such as Arrow's, would get a separate module.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from nano_loop.data.collate import ARRAYS, collate
from nano_loop.patching.attributes import has_own
from nano_loop.patching.torch_private_loaders import collates_as_torch

#: The instructions in CPython 3.10 to 3.14, which also has paired and borrowing variants of those in the first line.
_LOADS = ("LOAD_FAST", "STORE_FAST")
_OTHERS = frozenset(
    (
        *("LOAD_ATTR", "LOAD_CONST", "BINARY_SUBSCR", "BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"),
        *("NOP", "RESUME", "RETURN_VALUE", "ROT_THREE", "ROT_TWO", "SWAP"),
    )
)


class Row(NamedTuple):
    """A placeholder for the row of a tensor or an array at the index."""

    values: Any


class _Index:
    """A placeholder for the index."""


class _Values:
    """A placeholder for a tensor or an array."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __getitem__(self, index: Any) -> Row:
        if type(index) is not _Index:
            raise TypeError(index)
        return Row(self._values)


def indexed_sample(dataset: Any) -> Any:
    """Return the structure of a sample, with a `Row` for each row, or None if ``__getitem__`` does more than index."""
    kind: Any = type(dataset)
    function = getattr(kind, "__getitem__", None)
    if type(function) is not FunctionType or not _only_indexes(function.__code__):
        return None
    if isinstance(dataset, IterableDataset) or getattr(dataset, "__getitems__", None):  # no `__getitem__`
        return None
    names = function.__code__.co_names
    if kind.__getattribute__ is not object.__getattribute__ or any(hasattr(kind, name) for name in names):
        return None  # code of the class may compute the attribute
    attributes = {name: vars(dataset).get(name) for name in names}
    if not {*map(type, attributes.values())} <= {Tensor, *ARRAYS}:
        return None
    try:
        sample = function(SimpleNamespace(**{name: _Values(value) for name, value in attributes.items()}), _Index())
        return sample if [*rows_in(sample)] else None
    except (AttributeError, IndexError, TypeError):  # for anything that the placeholders lack
        return None


def rows_in(part: Any) -> Iterator[Row]:
    """Yield the rows in a sample that consists only of rows, in tuples, lists and dicts."""
    if type(part) is Row:
        yield part
    elif type(part) in (tuple, list, dict):
        for value in part.values() if type(part) is dict else part:
            yield from rows_in(value)
    else:
        raise TypeError(part)


@functools.lru_cache(maxsize=64)
def _only_indexes(code: CodeType) -> bool:
    return all(
        instruction.opname in _OTHERS
        or instruction.opname.startswith(_LOADS)
        or (instruction.opname, instruction.argrepr) == ("BINARY_OP", "[]")
        for instruction in dis.get_instructions(code)
    )


Positions = np.ndarray[Any, np.dtype[np.int64]]


class WholeBatches(Dataset[Any]):
    """A dataset of supported leaves, read for each batch, that returns a whole batch for positions of samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, positions: Sequence[Any]) -> Any:
        """Return the batch, sample by sample if they do not fit together; torch raises for invalid positions."""
        try:
            if collates_as_torch():
                return batch_of(self.dataset, _array(positions))
        except (IndexError, OverflowError, RuntimeError, TypeError, ValueError):
            pass
        read = getattr(self.dataset, "__getitems__", None)
        return collate(read(positions) if read else [self.dataset[position] for position in positions])


def leaves_of(dataset: Any) -> Iterator[Any]:
    """Yield the data from which samples are taken, such as the tensors of a `TensorDataset`."""
    if _is(dataset, Subset):
        yield from leaves_of(dataset.dataset)
    elif _is(dataset, TensorDataset):
        yield from dataset.tensors
    elif _is(dataset, ConcatDataset) or _is(dataset, StackDataset):
        parts = dataset.datasets
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from leaves_of(part)
    elif _is_of_skorch(dataset):
        for part in (dataset.X, dataset.y):
            yield from part.values() if type(part) is dict else () if part is None else (part,)
    elif (sample := indexed_sample(dataset)) is not None:
        yield from (row.values for row in rows_in(sample))
    else:
        yield dataset


def is_supported(leaf: Any) -> bool:
    """Whether torch would stack the rows of a tensor or an array. A subclass may have its own kind of rows."""
    if type(leaf) is Tensor:
        return leaf.dim() > 0 and leaf.layout is torch.strided
    if type(leaf) not in ARRAYS or not leaf.ndim or leaf.dtype.kind not in "biufc" or not len(leaf):
        return False
    try:
        return bool(torch.from_numpy(leaf[:1].copy()).dtype is default_collate([leaf[0], leaf[0]]).dtype)
    except (TypeError, ValueError):  # torch has no such dtype, or no such byte order
        return False


def batch_of(dataset: Any, positions: Positions) -> Any:
    """Return the batch of samples at these positions for a dataset with supported leaves."""
    if _is(dataset, Subset):
        return batch_of(dataset.dataset, _array([dataset.indices[position] for position in positions.tolist()]))
    if _is(dataset, TensorDataset):
        return [_rows(tensor, positions) for tensor in dataset.tensors]
    if _is(dataset, ConcatDataset):
        return _batch_of_several(dataset, positions)
    if _is(dataset, StackDataset):
        if isinstance(dataset.datasets, Mapping):
            return {key: batch_of(part, positions) for key, part in dataset.datasets.items()}
        return [batch_of(part, positions) for part in dataset.datasets]
    if _is_of_skorch(dataset):
        targets = (
            torch.zeros(len(positions), 1, device="cpu") if dataset.y is None else _rows_of_skorch(dataset.y, positions)
        )
        return [_rows_of_skorch(dataset.X, positions), targets]
    if type(dataset) is Tensor or type(dataset) in ARRAYS:
        return _rows(dataset, positions)
    return _batch_of_rows(indexed_sample(dataset), positions)


def _batch_of_rows(part: Any, positions: Positions) -> Any:
    """Return the batch of samples that consist of rows, in tuples, lists and dicts."""
    if type(part) is Row:
        return _rows(part.values, positions)
    if type(part) is dict:
        return {key: _batch_of_rows(value, positions) for key, value in part.items()}
    return [_batch_of_rows(value, positions) for value in part]


def _batch_of_several(dataset: ConcatDataset[Any], positions: Positions) -> Any:
    """Return a batch of samples of concatenated datasets."""
    length = len(dataset)
    positions = np.where(positions < 0, positions + length, positions)
    if len(positions) and not 0 <= positions.min() <= positions.max() < length:
        raise IndexError(positions)
    owners = np.searchsorted(dataset.cumulative_sizes, positions, side="right")
    batches, places = [], []
    for owner in np.unique(owners):
        (of_owner,) = np.nonzero(owners == owner)
        start = dataset.cumulative_sizes[owner - 1] if owner else 0
        batches.append(batch_of(dataset.datasets[owner], positions[of_owner] - start))
        places.append(of_owner)
    return _joined(batches, torch.from_numpy(np.argsort(np.concatenate(places))))


def _joined(batches: Sequence[Any], order: Tensor) -> Any:
    """Concatenate batches of equal structure, in the given order."""
    first = batches[0]
    if len({type(batch) for batch in batches}) > 1:
        raise TypeError("the samples of the datasets are not of one kind")
    if isinstance(first, Tensor):
        return torch.cat(list(batches)).index_select(0, order)
    if isinstance(first, dict):
        return {key: _joined([batch[key] for batch in batches], order) for key in first}
    return [_joined(parts, order) for parts in zip(*batches, strict=True)]


def _is(dataset: Any, kind: type) -> bool:
    """Whether a dataset is exactly of this class, and the class's own code reads samples."""
    return type(dataset) is kind and has_own(kind, "__getitem__", "__getitems__")


def _is_of_skorch(dataset: Any) -> bool:
    return (type(dataset).__module__, type(dataset).__qualname__) == ("skorch.dataset", "Dataset")


def _rows_of_skorch(values: Any, positions: Positions) -> Any:
    if type(values) is dict:
        return {key: _rows(value, positions) for key, value in values.items()}
    return _rows(values, positions)


def _rows(values: Any, positions: Positions) -> Tensor:
    """Return the rows of a tensor or an array, in the layout that `torch.stack` returns."""
    if isinstance(values, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(values.take(positions, axis=0)))
    index = torch.from_numpy(positions)
    try:
        rows: Tensor = values.index_select(0, index)
    except (IndexError, RuntimeError):  # IPEX's is a RuntimeError
        # A negative position counts from the end. Positions out of range raise the usual error.
        rows = values[index]
    return rows.contiguous()


def _array(positions: Sequence[Any]) -> Positions:
    """Return integer positions as an array; numpy is three times as fast as torch. Raise a TypeError for others."""
    if not all(map(_is_integer, {*map(type, positions)})) and not all(map(_holds_integer, positions)):
        raise TypeError(positions)
    return np.fromiter(positions, np.int64, len(positions))


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _holds_integer(value: Any) -> bool:
    if type(value) is not Tensor:
        return _is_integer(type(value))
    return not value.dim() and value.dtype not in (torch.bool, torch.uint8) and not value.is_floating_point()
