"""The one register of what runs change in the whole process: each change has users, and ends with the last of them.

Two runs may overlap in two threads and end in any order. So no run undoes a change that another run still uses, and
what a change replaces is captured once, before the first user: never what another run has put there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass
class _Change:
    context: AbstractContextManager[Any]
    value: Any
    users: int = 0


# Reentrant, since a change may be made of others.
_lock = threading.RLock()
_changes: dict[Hashable, _Change] = {}


@contextmanager
def shared_change(key: Hashable, make: Callable[[], AbstractContextManager[Value]]) -> Iterator[Value]:
    """Keep a change to the process in force until the last of those who asked for it has left.

    Parameters
    ----------
    key : hashable
        Names the change, such as an operator with its dispatch key.
    make : callable
        Returns the context manager that makes the change and undoes it. It is called for the first user alone.

    Yields
    ------
    object
        What the context manager yields, the same for every user.
    """
    change = _enter(key, make)
    try:
        yield change.value
    finally:
        _leave(key)


def users(key: Hashable) -> int:
    """Return how many use a change now."""
    with _lock:
        return _changes[key].users if key in _changes else 0


def _enter(key: Hashable, make: Callable[[], AbstractContextManager[Any]]) -> _Change:
    with _lock:
        change = _changes.get(key)
        if change is None:
            context = make()
            change = _changes[key] = _Change(context, context.__enter__())
        change.users += 1
        return change


def _leave(key: Hashable) -> None:
    with _lock:
        change = _changes[key]
        change.users -= 1
        if not change.users:
            del _changes[key]
            change.context.__exit__(None, None, None)
