"""Traverses nested tuples, lists, dicts, dataclasses, namespaces and objects of tensors and other objects."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, MutableMapping
from types import GeneratorType, ModuleType, SimpleNamespace
from typing import Any

import torch

from nano_loop.patching.torch_private import version
from nano_loop.patching.walk import named_attributes_of

_NAMESPACES = (SimpleNamespace, Namespace)
_LEAVES = (str, bytes, int, float, type(None))
#: How many objects deep the attributes of objects are looked at.
_DEPTH = 4


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in `value`.

    Parameters
    ----------
    function : callable
        Takes a tensor and returns a tensor, or the same object for no change.
    value : object
        A tensor, or arbitrarily nested tuples (including named tuples), lists, mappings, dataclasses and namespaces of
        tensors. Other objects are returned unchanged.

    Returns
    -------
    object
        `value` itself if no tensor changed. Otherwise, the containers of changed tensors are copied, with their class.
        `value` is never changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, tuple):
        return _map_tuple(functools.partial(map_tensors, function), value)
    mapped = [(key, old, map_tensors(function, old)) for key, old in _items(value)]
    return _with_items(value, [(key, new) for key, old, new in mapped if new is not old])


def _map_tuple(change: Callable[[Any], Any], value: tuple[Any, ...]) -> Any:
    items = [change(item) for item in value]
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _with_items(value: Any, changed: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a container with other items at some keys, or the container itself if there are none."""
    if not changed:
        return value
    result = copy.copy(value)
    for key, new in changed:
        put_item(result, key, new)
    return result


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a list, mapping, dataclass or namespace; nothing for other objects."""
    if isinstance(value, list):
        return list(enumerate(value))
    if isinstance(value, MutableMapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [(name, getattr(value, name)) for name in names]
    return list(vars(value).items()) if isinstance(value, _NAMESPACES) else []


class Substitution:
    """Substitutes tensors in the arguments of a call, and restores the originals with the writes of the call.

    Lists, mappings, dataclasses and namespaces are changed in place, since the called function may write to them.
    Tuples and frozen dataclasses are copied.
    Without `restore`, it converts outputs that the model may have lent: what the caller removes from a list is removed
    from the model's.

    Parameters
    ----------
    function : callable
        Takes a tensor and returns its substitute, or the same object for no change.
    everywhere : bool
        Also in the attributes of other objects, and in what generators and other iterators yield.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], everywhere: bool = False) -> None:
        self._function = function
        self._everywhere = everywhere
        self._depth = 0
        self._seen: dict[int, Any] = {}  # what has become of each value, by its id
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # the original, its substitute, its version
        #: What was changed in place: a container, a key, the original item, and its substitute.
        self.items: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors substituted."""
        if not self._everywhere:
            return self._substituted(value)
        if id(value) not in self._seen:
            self._seen[id(value)] = value  # for what holds itself
            self._seen[id(value)] = self._substituted(value)
        return self._seen[id(value)]

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._substitute(value)
        if isinstance(value, tuple):
            return _map_tuple(self, value)
        if not self._everywhere or isinstance(value, _LEAVES):
            return self._in_place(value, _items(value))
        if isinstance(value, GeneratorType):
            return _generated(self._function, value)
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):  # of builtins and itertools
            return map(Substitution(self._function, True), value)
        items = _items(value)
        if items or self._depth == _DEPTH:
            return self._in_place(value, items)
        self._depth += 1
        try:
            return self._in_place(value, attributes_with_names(value))
        finally:
            self._depth -= 1

    def _in_place(self, value: Any, items: list[tuple[Any, Any]]) -> Any:
        substitutes = [(key, old, self(old)) for key, old in items]
        changed = [(key, old, new) for key, old, new in substitutes if new is not old]
        if changed and _is_frozen(value):
            return _with_items(value, [(key, new) for key, _, new in changed])
        for key, old, new in changed:
            put_item(value, key, new)
            self.items.append((value, key, old, new))
        return value

    def restore(self) -> None:
        """Replace the remaining substitutes by the originals, and copy what was written to a substitute."""
        for container, key, original, substitute in reversed(self.items):
            if holds_item(container, key, substitute):
                put_item(container, key, original)
        for tensor, substitute, before in self._tensors:
            changed = version(substitute) != before or substitute.is_inference()  # these have no version counter
            if changed and not shares_memory(tensor, substitute):
                with torch.no_grad():
                    tensor.copy_(substitute)

    def _substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        substitute = self._function(tensor)
        if substitute is not tensor:
            self._tensors.append((tensor, substitute, version(substitute)))
        return substitute


def _generated(function: Callable[[torch.Tensor], torch.Tensor], values: GeneratorType[Any, Any, Any]) -> Any:
    """Yield what a generator yields, with substituted tensors, and pass on what is sent to it and thrown into it."""

    def substituted() -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = functools.partial(next, values)
        try:
            while True:
                item = Substitution(function, True)(resume())
                try:
                    resume = functools.partial(values.send, (yield item))
                except Exception as error:
                    resume = functools.partial(values.throw, error)
        except StopIteration as stop:
            return Substitution(function, True)(stop.value)
        finally:
            values.close()

    return substituted()


def attributes_with_names(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object that holds data. Callables, such as functions, and modules have none."""
    return [] if callable(value) or isinstance(value, ModuleType) else [*named_attributes_of(value)]


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory. Empty ones have none: their address is 0."""
    address = one.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()


def holds_item(container: Any, key: Any, item: Any) -> bool:
    """Whether a container has an item at a key, or an object as an attribute."""
    if isinstance(container, list):
        return key < len(container) and container[key] is item
    if isinstance(container, MutableMapping):
        return key in container and container[key] is item
    return getattr(container, key, None) is item


def put_item(container: Any, key: Any, item: Any) -> None:
    """Set an item of a container, or an attribute of an object, without the code of its class."""
    if isinstance(container, (list, MutableMapping)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also works if the dataclass is frozen


def _is_frozen(container: Any) -> bool:
    parameters = getattr(container, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen and not isinstance(container, (list, MutableMapping))
