"""The process-wide state of runs: patches, each of which ends with its last user, and tables that patches look into.

Runs in several threads may overlap and end in any order. So no run undoes a change that another run still uses, and the
original state is captured once, before the first user, so that it never includes another run's change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")
Table = TypeVar("Table", dict[Any, Any], list[Any], set[Any])
_tables: dict[str, dict[Any, Any] | list[Any] | set[Any]] = {}


def process_wide(name: str, table: Table) -> Table:
    """Register a table of what runs share in this process, and return it. Between runs it is empty.

    Parameters
    ----------
    name : str
        What it holds.
    table : dict, list or set
        A plain one, which costs no more than without the registration, and which `torch.compile` can trace.
    """
    _tables[name] = table
    return table


def left_by_runs() -> dict[str, int]:
    """Return how many entries there are in the tables, by their names. Outside of runs there are none."""
    return {name: len(table) for name, table in _tables.items() if table}


@dataclass
class _Change:
    context: AbstractContextManager[Any]
    value: Any
    users: int = 0


# Reentrant, since a change may make other changes.
_lock = threading.RLock()
_changes: dict[Hashable, _Change] = process_wide("changes, by key", {})
#: What the program itself undoes by another call, by the function that has made it.
until_undone: dict[Callable[..., Any], ExitStack] = process_wide("changes that the program undoes", {})


@contextmanager
def shared_change(key: Hashable, make: Callable[[], AbstractContextManager[Value]]) -> Iterator[Value]:
    """Make a process-wide change that lasts until its last user has exited.

    Parameters
    ----------
    key : hashable
        Identifies the change, such as an operator with its dispatch key.
    make : callable
        Returns the context manager that makes and undoes the change. It is called for the first user only.

    Yields
    ------
    object
        The value of the context manager, the same for every user.
    """
    with _lock:
        change = _changes.get(key)
        if change is None:
            context = make()
            change = _changes[key] = _Change(context, context.__enter__())
        change.users += 1
    del make  # which may hold an object of the user's
    try:
        yield change.value
    finally:
        with _lock:
            change.users -= 1
            if not change.users:
                del _changes[key]
                change.context.__exit__(None, None, None)


def _no_listeners() -> AbstractContextManager[list[Any]]:
    return nullcontext([])


@contextmanager
def listening(
    key: Hashable, listener: Any, make: Callable[[], AbstractContextManager[list[Any]]] = _no_listeners
) -> Iterator[None]:
    """Have an entry in the list that a change has as its value, by default a change of nothing else."""
    with shared_change(key, make) as listeners:
        listeners.append(listener)
        try:
            yield
        finally:
            listeners.remove(listener)


def values_in_force() -> list[Any]:
    """Return the values of all changes."""
    with _lock:
        return [change.value for change in [*_changes.values()]]  # an object that is freed meanwhile ends changes


def value_in_force(key: Hashable) -> Any:
    """Return the value of a change, or None if it is not in force."""
    with _lock:
        return _changes[key].value if key in _changes else None


@contextmanager
def listed(table: set[Any], entry: Any) -> Iterator[None]:
    """Have an entry in a table; by `shared_change` if there may be several users."""
    table.add(entry)
    try:
        yield
    finally:
        table.discard(entry)


def users(key: Hashable) -> int:
    """Return the number of current users of a change."""
    with _lock:
        return _changes[key].users if key in _changes else 0
