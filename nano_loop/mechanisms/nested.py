"""Walks the tuples, lists, dicts and dataclasses in which tensors and arguments come."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch

_LEAVES = (str, bytes, int, float, type(None))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in `value`.

    Parameters
    ----------
    function : callable
        Takes a tensor and returns one; the very same object where nothing has to change.
    value : object
        A tensor, or tuples (named ones too), lists, mappings and dataclasses of them, nested at will. Anything else
        is left alone.

    Returns
    -------
    object
        `value` itself where no tensor changed, else a copy of the containers that hold a changed one, of their own
        class. `value` is never changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, tuple):
        return _map_tuple(function, value)
    if isinstance(value, list):
        return _map_items(function, value, enumerate(value))
    if isinstance(value, MutableMapping):
        return _map_items(function, value, value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(function, value)
    return value


def _map_tuple(function: Callable[[torch.Tensor], torch.Tensor], value: tuple[Any, ...]) -> Any:
    items = [map_tensors(function, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _map_items(function: Callable[[torch.Tensor], torch.Tensor], value: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    mapped = ((key, old, map_tensors(function, old)) for key, old in items)
    changed = [(key, new) for key, old, new in mapped if new is not old]
    if not changed:
        return value
    result = copy.copy(value)
    for key, new in changed:
        result[key] = new
    return result


def _map_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    mapped = ((name, getattr(value, name), map_tensors(function, getattr(value, name))) for name in names)
    changed = [(name, new) for name, old, new in mapped if new is not old]
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed:
        object.__setattr__(result, name, new)  # also where the dataclass is frozen
    return result


def find(kind: type | tuple[type, ...], value: Any) -> Iterator[Any]:
    """Yield every instance of `kind` in `value`: itself, or inside lists, tuples, sets and dicts, each once."""
    yield from _find(kind, value, set())


def _find(kind: type | tuple[type, ...], value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    if isinstance(value, kind):
        seen.add(id(value))
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        seen.add(id(value))  # a list may hold itself
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find(kind, item, seen)
