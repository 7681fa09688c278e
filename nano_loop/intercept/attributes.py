"""Replaces attributes of classes for as long as a run needs it, and puts back exactly what was there.

A user's objects stay what they are (`type(layer) is nn.Linear`, `copy.deepcopy`, `pickle`) only when nothing is
hung on the objects themselves. So what has to happen on a call is hung on the class, once, and looks the object up
in a table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ABSENT = object()
_lock = threading.Lock()


@dataclass
class _Replacement:
    original: Any  # what stood in the class's own __dict__, or _ABSENT
    replacement: Any
    users: int = 0


_active: dict[tuple[type, str], _Replacement] = {}


@contextmanager
def replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``owner.name`` until the last of those who asked for it has left.

    Parameters
    ----------
    owner : type
        The class; its subclasses inherit the replacement.
    name : str
        The attribute. Where `owner` only inherits it, `owner` gets one of its own for the time.
    make : callable
        Is given the attribute as ``getattr(owner, name)`` finds it, and returns what stands in for it. It is called
        for the first of several that ask for the same attribute, so one attribute has one maker.
    """
    _enter(owner, name, make)
    try:
        yield
    finally:
        _leave(owner, name)


def _enter(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    with _lock:
        entry = _active.get((owner, name))
        if entry is None:
            entry = _Replacement(vars(owner).get(name, _ABSENT), make(getattr(owner, name)))
            setattr(owner, name, entry.replacement)
            _active[owner, name] = entry
        entry.users += 1


def _leave(owner: type, name: str) -> None:
    with _lock:
        entry = _active[owner, name]
        entry.users -= 1
        if entry.users:
            return
        del _active[owner, name]
        # Where somebody has put their own on top of ours meanwhile, theirs stays: it calls ours, which passes through.
        if vars(owner).get(name) is not entry.replacement:
            return
        if entry.original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, entry.original)
