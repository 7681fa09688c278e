"""The data of modules: which objects hold data, what these hold, and how a worker's are set to the caller's."""

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

#: Types of values that hold nothing.
SCALARS = {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)}
_BASES = (OrderedDict, defaultdict, dict, list, set)  # builtin classes of instances with items
# Classes of the standard library whose attributes are all that there is of an instance.
_NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local, threading.Event, threading.Condition)
#: What makes a lock, by its type.
LOCKS: dict[type, Any] = {type(make()): make for make in (threading.Lock, threading.RLock)}
_SPECIAL: tuple[type, ...] = (*REDUCTIONS, Enum, BaseException, type)
_SLOT = MemberDescriptorType
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MISSING = object()
_SET_LAST = (dict, set, ModuleType, type, FunctionType)  # where instances may be keys, by what they hold

#: Where an object is, and of which class: the number of the place that holds it, and the name of the attribute or, in
#: a tuple, the key of the item. Of what is imported, the number is -1, and the key a module and a qualified name. In
#: place of the class stands the code of a function, or what makes a lock.
Place = tuple[int, Any, Any]
#: The attributes of an object, and its items: pairs of a dict, variables of a function's closure.
Contents = tuple[Mapping[str, Any], Any]


class LeftOut(NamedTuple):
    """What stands for a value that is not sent: a worker keeps what it has.

    Attributes
    ----------
    words : str
        Which value, and why.
    is_required : bool
        Whether a worker fails that has nothing there.
    """

    words: str
    is_required: bool


def is_plain(kind: type) -> bool:
    """Whether the attributes and items of an instance are all that there is of it, and a worker can make one."""
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
    """Whether instances are compared by what they hold and are never changed: a key has to be whole when it is read."""
    hashing: Any = kind.__hash__
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return bool(is_frozen) or (hasattr(kind, "__attrs_attrs__") and hashing not in (object.__hash__, None))


def are_scalars(values: Iterable[Any]) -> bool:
    """Whether all values are numbers, strings and the like."""
    return {*map(type, values)} <= SCALARS


def contents_of(value: Any) -> Contents:
    """Return what an object holds, without running code of its class."""
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
    """Return what an object holds by its place there: attributes by name, and items by a tuple of the index or key."""
    attributes, items = contents
    kind = type(value)  # isinstance would run a __class__ property of the program's
    if items is None or issubclass(kind, set) or are_scalars(items):
        return attributes
    pairs = enumerate(items) if issubclass(kind, list) else items
    return {**attributes, **{(key,): item for key, item in pairs if type(key) in SCALARS}}


def _base_of(kind: type) -> Any:
    return next((base for base in _BASES if issubclass(kind, base)), None)


# --- how it is found, made and set in a worker ---


def take_state(places: Sequence[Place], read: Callable[[list[Any]], Sequence[Contents]]) -> None:
    """Let the objects at places hold what the caller's do, in place.

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
    """Return a module, or a class or a function in it by its qualified name; None if it is not there."""
    try:
        value: Any = importlib.import_module(module)
    except Exception:  # what an import raises is anything; what needs the module raises it again
        return None
    for name in filter(None, qualified.split(".")):
        value = vars(value).get(name) if isinstance(value, (ModuleType, type)) else None
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return value


def _is_like(own: Any, kind: Any) -> bool:
    """Whether an object can take the contents of another one."""
    if isinstance(kind, CodeType):  # a function may have been wrapped here, or there
        return type(own) is FunctionType and own.__code__ == kind
    return isinstance(own, type) if kind is type else LOCKS.get(type(own), type(own)) is kind


def new_of(kind: Any) -> Any:
    """Return an object that takes contents then, without calling its constructor."""
    if kind in LOCKS.values():
        return kind()
    roots: tuple[Any, ...] = (*_BASES, *_NAMESPACES, object)
    return next(root for root in roots if issubclass(kind, root)).__new__(kind)


def set_contents(value: Any, contents: Contents) -> None:
    """Let an object hold what another one did, in place.

    Raises
    ------
    NanoError
        If there is nothing in the place of code that could not be sent.
    """
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
    """Return what is to be held in the place of `own`."""
    if type(sent) is not LeftOut:
        return sent
    if sent.is_required and own is _MISSING:
        expected = "workers import that module anew, and have nothing there"
        hint = "Set it in a function, call that, and pass it as worker_init"
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
