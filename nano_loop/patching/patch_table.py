"""Process-wide state shared by runs: patches, which are undone when their last user exits, and lookup tables.

Runs in several threads may overlap and end in any order, so no run undoes a change that another run still uses. The
original state is captured once, before the first user, so it never includes another run's change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")
Table = TypeVar("Table", dict[Any, Any], list[Any], set[Any])
_tables: dict[str, dict[Any, Any] | list[Any] | set[Any]] = {}


def process_wide(name: str, table: Table) -> Table:
    """Register and return a plain table of state of the process, which is empty when no run is active."""
    _tables[name] = table
    return table


def left_by_runs() -> dict[str, int]:
    """Return the number of entries in each non-empty table, by table name. Empty when no run is active."""
    return {name: len(table) for name, table in _tables.items() if table}


@contextmanager
def entry_set(table: MutableMapping[Any, Any], key: Hashable, value: Any) -> Iterator[None]:
    """Set an entry of a table, and afterwards restore the one of a run around this one, or remove it."""
    before = {key: table[key]} if key in table else {}
    table[key] = value
    try:
        yield
    finally:
        table.pop(key, None)
        table.update(before)


@dataclass
class _Change:
    context: AbstractContextManager[Any]
    value: Any
    users: int = 0


# Reentrant because making a change may make other changes.
_lock = threading.RLock()
_changes: dict[Hashable, _Change] = process_wide("changes, by key", {})
#: Changes that the program undoes by a separate call, by the function that made them.
until_undone: dict[Callable[..., Any], ExitStack] = process_wide("changes that the program undoes", {})


@contextmanager
def shared_change(key: Hashable, make: Callable[[], AbstractContextManager[Value]]) -> Iterator[Value]:
    """Make a change, identified by a key, until its last user exits; all get the value of the first one's `make`."""
    with _lock:
        change = _changes.get(key)
        if change is None:
            context = make()
            change = _changes[key] = _Change(context, context.__enter__())
        change.users += 1
    del make  # it may hold a user's object
    try:
        yield change.value
    finally:
        with _lock:
            change.users -= 1
            if not change.users:
                del _changes[key]
                change.context.__exit__(None, None, None)


@contextmanager
def listening(
    key: Hashable, listener: Any, make: Callable[[], AbstractContextManager[list[Any]]] = lambda: nullcontext([])
) -> Iterator[None]:
    """Add a listener to the list that is the value of a change; the default change only holds the list."""
    with shared_change(key, make) as listeners:
        listeners.append(listener)
        try:
            yield
        finally:
            listeners.remove(listener)


def values_in_force() -> list[Any]:
    """Return the values of all changes."""
    with _lock:
        return [change.value for change in [*_changes.values()]]  # a list: freeing objects may end changes


def value_in_force(key: Hashable) -> Any:
    """Return the value of an active change, or None if it is not active."""
    with _lock:
        return _changes[key].value if key in _changes else None


def users(key: Hashable) -> int:
    """Return the number of current users of a change."""
    with _lock:
        return _changes[key].users if key in _changes else 0
