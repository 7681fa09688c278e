"""Datasets whose ``__getitem__`` only indexes tensors and arrays, as in ``return self.x[index], self.y[index]``.

This is checked in the bytecode: it may only load attributes, index, and build tuples, lists and dicts. Such code has no
branches, calls or side effects, so one call with placeholders for the dataset and the index shows the structure of all
samples.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset

from nano_loop.data.collate import ARRAYS

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
