"""The data of modules: the objects that hold it, their contents, and setting a worker's objects to the caller's."""

from __future__ import annotations

import argparse
import importlib
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from nano_loop.distributed.payload.code_reductions import function_contents, set_function
from nano_loop.distributed.payload.faithful_pickler import REDUCTIONS
from nano_loop.distributed.payload.reached_modules import NOT_COMPARED, package_of
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.walk import named_attributes_of

#: Types of values without contents.
SCALARS = {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)}
_BASES = (OrderedDict, defaultdict, dict, list, set)  # built-in base classes of instances with items
# Standard library classes whose instances consist only of attributes.
_NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local, threading.Event, threading.Condition)
#: Lock constructors by type.
LOCKS: dict[type, Any] = {type(make()): make for make in (threading.Lock, threading.RLock)}
_SPECIAL: tuple[type, ...] = (*REDUCTIONS, Enum, BaseException, type)
_SLOT = MemberDescriptorType
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MISSING = object()
_SET_LAST = (dict, set, ModuleType, type, FunctionType)  # instances may be keys of these, hashed by their contents

#: The location of an object, and its class: the number of the place that holds it, and the name of the attribute, or
#: the key of the item in a tuple. For imported objects, the number is -1, and the key is a module and a qualified name.
#: Instead of a class, there can be the code of a function or the constructor of a lock.
Place = tuple[int, Any, Any]
#: The attributes of an object, and its items: pairs of a dict, or closure variables of a function.
Contents = tuple[Mapping[str, Any], Any]


class LeftOut(NamedTuple):
    """A placeholder for a value that is not sent, with the reason: a worker needs its own if `is_required`."""

    words: str
    is_required: bool


def is_plain(kind: type) -> bool:
    """Whether an instance consists of its attributes and items only, and a worker can create one."""
    if kind in (*_BASES, *_NAMESPACES):
        return True
    if issubclass(kind, _SPECIAL) or package_of(kind) in NOT_COMPARED or _is_value(kind):
        return False
    bases: tuple[type, ...] = (*_BASES, *_NAMESPACES, object)
    root = next(base for base in bases if issubclass(kind, base))
    members = sum(type(value) is _SLOT for base in kind.__mro__ for value in vars(base).values())
    in_python = all(base.__flags__ & _HEAP_TYPE or base in (*bases, Counter) for base in kind.__mro__)
    return in_python and kind.__basicsize__ <= root.__basicsize__ + 8 * (members + 2)


def _is_value(kind: type) -> bool:
    """Whether instances are immutable and compared by contents: a key must be complete when it is read."""
    hashing: Any = kind.__hash__
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return bool(is_frozen) or (hasattr(kind, "__attrs_attrs__") and hashing not in (object.__hash__, None))


def are_scalars(values: Iterable[Any]) -> bool:
    """Whether all values are scalars, such as numbers and strings."""
    return {*map(type, values)} <= SCALARS


def contents_of(value: Any) -> Contents:
    """Return the contents of an object, without running code of its class."""
    kind = type(value)
    if kind is FunctionType:
        return function_contents(value)
    if issubclass(kind, (ModuleType, type)):
        return vars(value), None
    factory = {"default_factory": value.default_factory} if issubclass(kind, defaultdict) else {}
    base = _base_of(kind)
    items = base and (base.items(value) if issubclass(base, dict) else base.__iter__(value))
    return {**factory, **dict(named_attributes_of(value))}, base and [*items]


def parts_of(value: Any, contents: Contents) -> Mapping[Any, Any]:
    """Return the parts of an object: attributes by name, and items by a tuple of the index or key."""
    attributes, items = contents
    kind = type(value)  # isinstance would run a program's __class__ property
    if items is None or issubclass(kind, set) or are_scalars(items):
        return attributes
    pairs = enumerate(items) if issubclass(kind, list) else items
    return {**attributes, **{(key,): item for key, item in pairs if type(key) in SCALARS}}


def _base_of(kind: type) -> Any:
    return next((base for base in _BASES if issubclass(kind, base)), None)


# --- how it is found, made and set in a worker ---


def take_state(places: Sequence[Place], read: Callable[[list[Any]], Sequence[Contents]]) -> None:
    """Set the objects at the places that the caller has sent to its contents, in place.

    `read` accepts the objects that the unpickler must know in advance, and returns the contents of the places.
    """
    objects: list[Any] = []
    parts: dict[int, Mapping[Any, Any]] = {}
    taken: set[int] = set()
    for parent, key, kind in places:
        if parent >= 0 and parent not in parts:
            parts[parent] = parts_of(objects[parent], contents_of(objects[parent]))
        own = _imported(*key) if parent < 0 else parts[parent].get(key)
        if not _is_like(own, kind) or id(own) in taken:
            own = None if parent < 0 else new_of(kind)
        objects.append(own)
        taken.add(id(own))
    known = [value for (parent, *_), value in zip(places, objects, strict=True) if parent >= 0]
    held = [*zip(objects, read(known), strict=True)]
    for value, contents in sorted(held, key=lambda one: isinstance(one[0], _SET_LAST)):
        if value is not None:
            set_contents(value, contents)


def _imported(module: str, qualified: str) -> Any:
    """Return a module, or a class or function in it by its qualified name; None if it does not exist."""
    try:
        value: Any = importlib.import_module(module)
    except Exception:  # an import may raise anything; users of the module raise it again
        return None
    for name in filter(None, qualified.split(".")):
        value = vars(value).get(name) if isinstance(value, (ModuleType, type)) else None
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return value


def _is_like(own: Any, kind: Any) -> bool:
    """Whether an object can receive the contents of another one."""
    if isinstance(kind, CodeType):  # a function may have been wrapped on either side
        return type(own) is FunctionType and own.__code__ == kind
    return isinstance(own, type) if kind is type else LOCKS.get(type(own), type(own)) is kind


def new_of(kind: Any) -> Any:
    """Return an empty object to receive contents, without calling its constructor."""
    if kind in LOCKS.values():
        return kind()
    roots: tuple[Any, ...] = (*_BASES, *_NAMESPACES, object)
    return next(root for root in roots if issubclass(kind, root)).__new__(kind)


def set_contents(value: Any, contents: Contents) -> None:
    """Set an object's contents to another's in place; raise a `NanoError` if code that is not sent is missing."""
    (sent, items), kind = contents, type(value)
    if kind is FunctionType:
        set_function(value, (sent, items))
        return
    own = contents_of(value)[0]
    kept = {name: _kept(attribute, own.get(name, _MISSING)) for name, attribute in sent.items()}
    attributes = {name: attribute for name, attribute in kept.items() if attribute is not _MISSING}
    if kind is ModuleType:
        vars(value).update(attributes)
    elif issubclass(kind, type):
        for name, attribute in attributes.items():
            type.__setattr__(value, name, attribute)
    else:
        _set_attributes(value, own, attributes)
        _set_items(value, items)


def _kept(sent: Any, own: Any) -> Any:
    """Return the value that should replace `own`."""
    if type(sent) is not LeftOut:
        return sent
    if sent.is_required and own is _MISSING:
        expected = "workers import that module again, and have no value there"
        hint = "Set it in a function, call it, and pass it as worker_init"
        raise NanoError(error_message(sent.words, expected, hint))
    return own


def _set_attributes(value: Any, own: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    slots = {name for base in type(value).__mro__ for name, slot in vars(base).items() if type(slot) is _SLOT}
    for name in slots & own.keys() - attributes.keys():
        object.__delattr__(value, name)
    for name in slots & attributes.keys():
        object.__setattr__(value, name, attributes[name])
    rest = {name: attribute for name, attribute in attributes.items() if name not in slots}
    if rest or own.keys() - slots:
        vars(value).clear()
        vars(value).update(rest)


def _set_items(value: Any, items: Any) -> None:
    base = _base_of(type(value))
    if base is None:
        return
    if issubclass(base, dict):
        pairs = [(key, _kept(item, dict.get(value, key, _MISSING))) for key, item in items]
        base.clear(value)
        for key, item in pairs:
            if item is not _MISSING:
                base.__setitem__(value, key, item)
    elif base is list:
        list.__setitem__(value, slice(None), items)
    else:
        set.clear(value)
        set.update(value, items)
