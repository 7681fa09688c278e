"""What both sides know of objects in modules: where they are, and which are their attributes and items alone."""

from __future__ import annotations

import argparse
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from enum import Enum
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

from nano_loop.distributed.payload.reached_modules import NOT_COMPARED, package_of
from nano_loop.distributed.payload.reductions import REDUCTIONS

#: Types of values that are equal where they look alike.
SCALARS = {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)}
#: Builtin classes that instances with items inherit from.
BASES = (OrderedDict, defaultdict, dict, list, set)
#: Classes of the standard library whose attributes are all that there is of an instance.
NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local, threading.Event, threading.Condition)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


#: Where an object is, and what it is, so that a worker finds its own one or makes it: the number of the place that the
#: steps begin at (-1 for what is imported), steps such as ``(("attribute", "cfg"), ("item", "model"))``, the kind of
#: object, and what is needed to make one. A plain tuple, since there are thousands.
Place = tuple[int, tuple[tuple[str, Any], ...], tuple[Any, ...]]


class Sent:
    """A value that is pickled with the state rather than found at a place.

    Parameters
    ----------
    value : Any
        What the worker takes, unless it is left out.
    parent, steps : int and tuple
        See `Place`.

    Attributes
    ----------
    name : str
        Such as ``project.settings.cfg['model']``; set where the value is left out.
    why : str
        Why the value is left out, and the worker keeps what it has; empty where it is sent.
    is_required : bool
        Whether a worker fails that has nothing there.
    """

    __slots__ = ("is_required", "name", "parent", "steps", "value", "why")

    def __init__(self, value: Any, parent: int, steps: tuple[tuple[str, Any], ...]) -> None:
        self.value, self.parent, self.steps = value, parent, steps
        self.name, self.why, self.is_required = "", "", False

    def leave_out(self, why: str, is_required: bool = False) -> None:
        """Leave the value to the worker."""
        self.value, self.why, self.is_required = None, why, is_required


_SPECIAL: tuple[type, ...] = (*REDUCTIONS, Enum, BaseException, type)


def is_plain(kind: type) -> bool:
    """Whether the attributes and items of an instance are all that there is of it, and a worker can make one."""
    if kind in NAMESPACES or kind is object:
        return True
    if issubclass(kind, _SPECIAL) or package_of(kind) in NOT_COMPARED or _is_value(kind):
        return False
    bases: tuple[type, ...] = (*BASES, *NAMESPACES, object)
    root = next(base for base in bases if issubclass(kind, base))
    members = sum(type(value) is MemberDescriptorType for base in kind.__mro__ for value in vars(base).values())
    in_python = all(base.__flags__ & _HEAP_TYPE or base in (*bases, Counter) for base in kind.__mro__)
    return in_python and kind.__basicsize__ <= root.__basicsize__ + 8 * (members + 2)


def _is_value(kind: type) -> bool:
    """Whether instances are compared by what they hold and are never changed: a key has to be whole when it is read."""
    hashing: Any = kind.__hash__
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return bool(is_frozen) or (hasattr(kind, "__attrs_attrs__") and hashing not in (object.__hash__, None))


def are_scalars(kinds: Iterable[type]) -> bool:
    """Whether all classes are those of numbers, strings and the like."""
    return {*kinds} <= SCALARS


def is_simple(key: Any) -> bool:
    """Whether a value is a number, a string or the like, or a tuple of these."""
    return type(key) in SCALARS or (type(key) is tuple and all(map(is_simple, key)))
