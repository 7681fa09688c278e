"""What a worker has in its modules is set to what the caller has in its own: see `module_state`."""

from __future__ import annotations

import importlib
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import FunctionType, MemberDescriptorType
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.payload.code_reductions import function_of
from nano_loop.distributed.payload.places import BASES, NAMESPACES, SCALARS, Place, Sent
from nano_loop.errors import NanoError, error_message

_MISSING = object()
_KEEP = object()


def take_state(places: Sequence[Place], read: Callable[[list[Any]], Sequence[Any]]) -> None:
    """Let the objects at places hold what the caller's do, in place; what is equal is left as it is.

    Parameters
    ----------
    places : sequence of Place
        What the caller has sent.
    read : callable
        Takes the objects that an unpickler is to know beforehand, and returns the contents of the places.

    Raises
    ------
    NanoError
        If code is missing in this process that could not be sent.
    """
    objects: list[Any] = []
    new: set[int] = set()
    taken: set[int] = set()  # the ids of those which have a place
    for place in places:
        own = _own(place, objects)
        if own is _MISSING or not _is_like(own, place[2]) or id(own) in taken:
            own = _new(place[2])
            if place[2][0] == "object":
                new.add(id(own))
        objects.append(own)
        taken.add(id(own))
    known = [value for place, value in zip(places, objects, strict=True) if place[2][0] not in ("module", "code")]
    contents = read(known)
    setter = _Setter(objects, contents, new)
    held = [
        (place[2][0], value, held)
        for place, value, held in zip(places, objects, contents, strict=True)
        if value is not None and held is not None
    ]
    for kind, value, contained in sorted(held, key=lambda one: one[0] != "object"):  # of which keys may be hashes
        setter.set(kind, value, contained)


# --- objects ---


def _own(place: Place, objects: Sequence[Any]) -> Any:
    parent, steps, (kind, *rest) = place
    if kind == "module":
        return _module(rest[0])
    if kind == "code":
        return _code(*rest[:2])
    value = objects[parent]
    for step, key in steps:
        value = _step(value, step, key)
        if value is _MISSING:
            break
    return value


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # what an import raises is anything; what needs the module raises it again
        return _MISSING


def _code(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = _attribute(value, part)
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return value


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of an object, without running code of the program."""
    for kind in type(value).__mro__:
        if isinstance(slot := vars(kind).get(name), MemberDescriptorType):
            try:
                return slot.__get__(value)
            except AttributeError:  # not assigned
                return _MISSING
    try:
        return vars(value).get(name, _MISSING)
    except TypeError:  # it has slots alone, or is None
        return _MISSING


def _step(value: Any, step: str, key: Any) -> Any:
    if step == "attribute":
        return _attribute(value, key)
    try:
        if step == "number" and issubclass(type(value), dict):
            return [*dict.values(value)][key]
        if step == "item":
            return dict.__getitem__(value, key) if issubclass(type(value), dict) else value[key]
        if step == "number":
            return list.__getitem__(value, key)
        if step == "default":
            return value.__defaults__[key]
        if step == "keyword":
            return value.__kwdefaults__[key]
        if step == "cell":
            return value.__closure__[key].cell_contents
        return value.get()
    except (LookupError, TypeError, ValueError, AttributeError):
        return _MISSING


def _is_like(own: Any, made: tuple[Any, ...]) -> bool:
    kind, *rest = made
    if kind in ("items", "object"):
        return type(own) is rest[0]
    if kind == "function":
        return type(own) is FunctionType and own.__code__ == rest[1] and own.__globals__.get("__name__") == rest[0]
    if kind == "tensor":
        return type(own) is rest[0] and bool(own.is_leaf)
    if kind == "array":
        return type(own) is np.ndarray and (own.shape, own.dtype) == (rest[0], rest[1]) and own.flags.writeable
    if kind == "context":
        return type(own) is ContextVar
    if kind == "code":  # a function may have been wrapped here, or there
        return isinstance(own, type) if len(rest) == 2 else type(own) is FunctionType and own.__code__ == rest[2]
    return kind != "lock" or type(own) is type(_lock(*rest))


def _new(made: tuple[Any, ...]) -> Any:
    kind, *rest = made
    if kind in ("items", "object"):
        (made_of,) = rest
        root: Any = next((base for base in (*BASES, *NAMESPACES) if issubclass(made_of, base)), object)
        return root.__new__(made_of)
    if kind == "function":
        module, code = rest
        return function_of(module, code, code.co_name)
    if kind == "tensor":
        return torch.nn.Parameter(torch.empty(0)) if rest[0] is torch.nn.Parameter else torch.empty(0)
    if kind == "array":
        return np.empty(*rest)
    if kind == "context":
        return ContextVar(rest[0])
    return _lock(*rest) if kind == "lock" else None


def _lock(is_plain: bool) -> Any:
    return threading.Lock() if is_plain else threading.RLock()


# --- contents ---


class _Setter:
    """Sets contents.

    Parameters
    ----------
    objects, contents : sequence
        By place.
    new_objects : set of int
        The ids of the instances that have been made for places.
    """

    def __init__(self, objects: Sequence[Any], contents: Sequence[Any], new_objects: set[int]) -> None:
        # What holds a file or a connection, and is not in this process, is left out as a whole, with what holds it.
        self._unfit: set[int] = set()
        made = [(value, held[1]) for value, held in zip(objects, contents, strict=True) if id(value) in new_objects]
        before = -1
        while before < len(self._unfit):
            before = len(self._unfit)
            for value, attributes in made:
                if any(self._taken(attribute, None) is _KEEP for _, attribute in attributes):
                    self._unfit.add(id(value))

    def set(self, kind: str, value: Any, held: Any) -> None:
        """Let an object hold what is sent."""
        getattr(self, f"_set_{kind}")(value, held)

    def _taken(self, value: Any, own: Any = _MISSING) -> Any:
        """Return the value that is sent, or `_KEEP` where this process keeps its `own`."""
        if type(value) is tuple:
            parts = [self._taken(part, None) for part in value]
            return _KEEP if any(part is _KEEP for part in parts) else tuple(parts)
        if id(value) in self._unfit:
            return _KEEP
        if type(value) is not Sent:
            return value
        if value.why and value.is_required and own is _MISSING:
            got = f"{value.name} {value.why}"
            expected = "workers import that module anew, and have nothing there"
            raise NanoError(error_message(got, expected, "Set it in a function, call that, and pass it as worker_init"))
        return _KEEP if value.why else value.value

    def _changed(self, value: Any, own: Any) -> Any:
        """Return the value that is to be set in the place of `own`; `_KEEP` for none."""
        taken = self._taken(value, own)
        return _KEEP if taken is _KEEP or _is_same(own, taken) else taken

    def _set_module(self, module: Any, held: Any) -> None:
        names, (values, code_names) = vars(module), held
        for name, value in values.items():
            changed = self._changed(value, names.get(name, _MISSING))
            if changed is not _KEEP:
                names[name] = changed
        for name, (origin, qualified) in code_names.items():
            own = names.get(name)
            is_code = isinstance(own, (type, FunctionType))
            is_there = is_code and (own.__module__, own.__qualname__) == (origin, qualified)
            if not is_there and _module(origin) is not _MISSING and (code := _code(origin, qualified)) is not _MISSING:
                names[name] = code

    def _set_code(self, code: Any, held: Any) -> None:
        if isinstance(code, FunctionType):
            self._set_function(code, held)
        elif isinstance(code, type):
            for name, value in held:
                changed = self._changed(value, vars(code).get(name, _MISSING))
                if changed is not _KEEP:
                    type.__setattr__(code, name, changed)

    def _set_function(self, function: FunctionType, held: Any) -> None:
        in_order, by_name, cells, attributes = held
        defaults = self._changed(tuple(value for _, value in in_order), function.__defaults__ or ())
        if defaults is not _KEEP:
            function.__defaults__ = defaults
        for name, value in by_name:
            changed = self._changed(value, (function.__kwdefaults__ or {}).get(name))
            if changed is not _KEEP:
                function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), name: changed}
        for number, value in cells:
            cell = (function.__closure__ or ())[number]
            changed = self._changed(value, _step(function, "cell", number))
            if changed is not _KEEP:
                cell.cell_contents = changed
        for name, value in attributes:
            changed = self._changed(value, vars(function).get(name, _MISSING))
            if changed is not _KEEP:
                vars(function)[name] = changed

    def _set_tensor(self, tensor: Any, held: tuple[torch.Tensor, bool]) -> None:
        data, requires_grad = held
        if tensor.dtype is not data.dtype or tensor.stride() != data.stride() or not torch.equal(tensor.detach(), data):
            tensor.data = data
        tensor.requires_grad_(requires_grad)

    def _set_array(self, array: Any, held: Any) -> None:
        if array.tobytes() != held.tobytes():
            array[...] = held

    def _set_context(self, variable: Any, held: tuple[Any]) -> None:
        changed = self._changed(held[0], variable.get(_MISSING))
        if changed is not _KEEP:
            variable.set(changed)

    def _set_object(self, value: Any, held: Any) -> None:
        items, attributes, sent_factory = held
        own = {name: _attribute(value, name) for name, _ in attributes}
        taken = {name: self._taken(attribute, own[name]) for name, attribute in attributes}
        if any(attribute is _KEEP for attribute in taken.values()):
            return  # as what holds a file or a connection of this process
        for name, attribute in taken.items():
            if not _is_same(own[name], attribute):
                _set_attribute(value, name, attribute)
        with suppress(TypeError):  # it has slots alone
            for name in vars(value).keys() - taken.keys():
                del vars(value)[name]
        if sent_factory is not None:
            factory = self._changed(sent_factory, value.default_factory)
            value.default_factory = value.default_factory if factory is _KEEP else factory
        if items is not None:
            self._set_items(value, items)

    def _set_items(self, value: Any, items: Sequence[Any]) -> None:
        if issubclass(type(value), dict):
            self._set_pairs(value, items)
            return
        wanted = [self._taken(item) for item in items]
        if any(item is _KEEP for item in wanted):
            return
        if issubclass(type(value), list):
            if len(value) != len(wanted) or not all(map(_is_same, value, wanted)):
                list.__setitem__(value, slice(None), wanted)
        elif value != {*wanted}:
            set.clear(value)
            set.update(value, wanted)

    def _set_pairs(self, value: Any, items: Sequence[tuple[Any, Any]]) -> None:
        base: Any = OrderedDict if issubclass(type(value), OrderedDict) else dict
        wanted: dict[Any, Any] = {}
        for sent_key, item in items:
            key = self._taken(sent_key)
            if key is _KEEP:
                continue
            own = dict.get(value, key, _MISSING)
            changed = self._changed(item, own)
            if changed is not _KEEP or own is not _MISSING:
                wanted[key] = own if changed is _KEEP else changed
        if [*dict.keys(value)] != [*wanted] or not all(map(operator.is_, dict.values(value), wanted.values())):
            base.clear(value)
            for key, item in wanted.items():
                base.__setitem__(value, key, item)


def _set_attribute(value: Any, name: str, attribute: Any) -> None:
    if any(isinstance(vars(kind).get(name), MemberDescriptorType) for kind in type(value).__mro__):
        object.__setattr__(value, name, attribute)
    else:
        vars(value)[name] = attribute


def _is_same(own: Any, value: Any) -> bool:
    if own is value:
        return True
    if type(own) is not type(value):
        return False
    if type(own) is tuple:
        return len(own) == len(value) and all(map(_is_same, own, value))
    if type(own) in (float, complex):
        return repr(own) == repr(value)
    return type(own) in SCALARS and bool(own == value)
