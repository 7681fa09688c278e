"""Traverses nested tuples, lists, sets, mappings, dataclasses and namespaces of tensors and other objects."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from argparse import Namespace
from collections import deque
from collections.abc import Callable, MutableMapping
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch

from nano_loop.patching.torch_private import version

_NAMESPACES = (SimpleNamespace, Namespace)
_LEAVES = (str, bytes, int, float, type(None))
_REBUILT = (tuple, functools.partial)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to every tensor in it, and itself if none changed.

    Containers, also dataclasses and namespaces, of changed tensors are copied, with their classes; other objects are
    not.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _REBUILT):
        return _rebuilt(functools.partial(map_tensors, function), value)
    mapped = [(key, old, map_tensors(function, old)) for key, old in _items(value)]
    return _with_items(value, [(key, new) for key, old, new in mapped if new is not old])


def _rebuilt(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a tuple or partial function with its items mapped, or the object itself if no item changed."""
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        function, args, named = (change(part) for part in (value.func, value.args, dict(value.keywords)))
        is_same = function is parts[0] and args is parts[1] and all(named[key] is parts[2][key] for key in named)
        return value if is_same else type(value)(function, *args, **named)
    old = tuple.__getitem__(value, slice(None))  # bypasses a subclass's code, which may raise
    items = [change(item) for item in old]
    if all(map(operator.is_, items, old)):
        return value
    try:
        new = tuple.__new__(type(value), items)
    except TypeError:  # a torch struct sequence, implemented in C
        return type(value)(items)
    getattr(new, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return new


def _with_items(value: Any, changed: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a container with some items replaced, or the container itself if there are none."""
    if not changed:
        return value
    result = copy.copy(value)
    for key, new in changed:
        _put_item(result, key, new)
    return result


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a list, set, mapping, dataclass or namespace; empty for other objects."""
    if isinstance(value, _LEAVES):
        return []
    if isinstance(value, list):
        return list(enumerate(list.__iter__(value)))
    if isinstance(value, CellType):
        return [("cell_contents", value.cell_contents)] if hasattr(value, "cell_contents") else []
    if isinstance(value, deque):
        return list(enumerate(deque.__iter__(value)))
    if isinstance(value, set):
        return [(item, item) for item in set.__iter__(value)]
    if isinstance(value, MutableMapping):
        return list(dict.items(value) if isinstance(value, dict) else value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [(name, getattr(value, name)) for name in names]
    return list(vars(value).items()) if isinstance(value, _NAMESPACES) else []


class Substitution:
    """Substitutes tensors in a value, and restores the originals including data written in the meantime.

    Lists, sets, mappings, dataclasses, namespaces, and the defaults and closure variables of functions are changed in
    place, because other code may hold references and write to them. Tuples and other frozen containers are copied.
    Other objects are not traversed.

    `function` accepts a tensor and returns its substitute, or the same object for no change.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        #: Each value and its substitute, by id, which preserves shared references and cycles.
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # the original, its substitute, its version
        #: In-place changes: the container, key, original item and substitute.
        self._items: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors substituted."""
        if id(value) not in self._seen:
            self._seen[id(value)] = value, value
            self._seen[id(value)] = value, self._substituted(value)
        return self._seen[id(value)][1]

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._substitute(value)
        if isinstance(value, _REBUILT):
            return _rebuilt(self, value)
        if isinstance(value, FunctionType):
            for part in (*(value.__closure__ or ()), value.__kwdefaults__):
                self(part)
            items = [("__defaults__", value.__defaults__)]
        else:
            items = _items(value)
        substitutes = [(key, old, self(old)) for key, old in items]
        changed = [(key, old, new) for key, old, new in substitutes if new is not old]
        if changed and _is_frozen(value):
            return _with_items(value, [(key, new) for key, _, new in changed])
        for key, old, new in changed:
            _put_item(value, key, new)
            self._items.append((value, key, old, new))
        return value

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor for which `tensor` was substituted, if `restore` gives it the same data and graph."""
        for original, substitute, before in self._tensors:
            if substitute is tensor:
                has_new_graph = tensor.requires_grad and version(tensor) != before
                return None if has_new_graph else original
        return None

    def restore(self) -> None:
        """Restore the originals of the remaining substitutes, and copy data written to a substitute."""
        for container, key, original, substitute in reversed(self._items):
            if _holds_item(container, key, substitute):
                _put_item(container, substitute if isinstance(container, set) else key, original)
        for tensor, substitute, before in self._tensors:
            changed = version(substitute) != before or substitute.is_inference()  # they have no version counter
            if changed and not shares_memory(tensor, substitute):
                with torch.no_grad():
                    tensor.copy_(substitute)

    def _substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        substitute = self._function(tensor)
        if substitute is not tensor:
            self._tensors.append((tensor, substitute, version(substitute)))
        return substitute


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory. Empty tensors have none: their address is 0."""
    address = one.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()


def _holds_item(container: Any, key: Any, item: Any) -> bool:
    """Whether a container has this item at a key, or an object has it as an attribute."""
    if isinstance(container, (list, deque)):
        return key < len(container) and container[key] is item
    if isinstance(container, set):
        return item in container
    if isinstance(container, MutableMapping):
        return key in container and container[key] is item
    return getattr(container, key, None) is item


def _put_item(container: Any, key: Any, item: Any) -> None:
    """Set an item of a container or an attribute of an object without running code of its class."""
    if isinstance(container, (list, deque, MutableMapping)):
        container[key] = item
    elif isinstance(container, set):
        container.remove(key)
        container.add(item)
    else:
        object.__setattr__(container, key, item)  # also works if the dataclass is frozen


def _is_frozen(container: Any) -> bool:
    parameters = getattr(container, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen and not isinstance(container, (list, MutableMapping))
