"""Changes to loaders: the iteration runs on a private copy, so that the loader itself is never changed.

`DataLoader.__iter__` and `DataLoader.__len__` are replaced while a run has changes to any loader. The replacements look
the loader up in a table, and pass through if it is not there. Several changes to one loader compose: each defines the
attributes that it overrides on the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.intercept.attributes import replaced
from nano_loop.intercept.torch_private import own_iterator, stop_kept_workers, without_kept_iterator

Loader = DataLoader[Any]
#: Starts the iteration of a loader.
Start = Callable[[], Iterator[Any]]


class LoaderChange:
    """Base class of changes to a loader. Subclasses override the methods that they need.

    A loader that is set up twice, or in nested runs, can have several changes of one class. The latest one applies.
    """

    def attributes(self, loader: Loader) -> dict[str, Any]:
        """Return the attributes that the copy overrides. Called at the start of each iteration."""
        return {}

    def iterate(self, loader: Loader, start: Start) -> Iterator[Any]:
        """Return the iterator for the loop. `start` returns the iterator of the copy."""
        return start()

    def length(self, loader: Loader, length: int) -> int:
        """Return the number of batches. `length` is the number without this change."""
        return length


@contextmanager
def changed(loader: Loader, change: LoaderChange) -> Iterator[None]:
    """Apply a change to the iteration of a loader. The loader itself is kept alive and is not changed.

    Worker processes that the copy keeps between epochs (``persistent_workers``) are stopped when the loader's last
    change ends. Worker processes that the loader started earlier are not affected.
    """
    with replaced(DataLoader, "__iter__", _through_copy), replaced(DataLoader, "__len__", _changed_length):
        stand_in = _stand_ins.get(id(loader)) or _StandIn(loader)
        _stand_ins[id(loader)] = stand_in
        stand_in.add(change)
        try:
            yield
        finally:
            stand_in.remove(change)
            if not stand_in.changes:
                del _stand_ins[id(loader)]
                stop_kept_workers(stand_in.copy)


class _StandIn:
    """A copy of a loader, with the changes to it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader  # kept alive, so that its id is not reused
        # Not `copy.copy`, which leaves a cache on the class and calls its pickling methods, and not __init__.
        self.copy: Loader = object.__new__(type(loader))
        vars(self.copy).update(without_kept_iterator(vars(loader)))
        self.changes: list[LoaderChange] = []
        self._in_force: list[LoaderChange] = []

    def add(self, change: LoaderChange) -> None:
        self.changes.append(change)
        self._choose()

    def remove(self, change: LoaderChange) -> None:
        self.changes.remove(change)
        self._choose()

    def iterate(self, original: Callable[[Loader], Iterator[Any]]) -> Iterator[Any]:
        self._refresh()
        start: Start = functools.partial(original, self.copy)
        for change in self._in_force:
            start = functools.partial(change.iterate, self.loader, start)
        return start()

    def length(self, length: int) -> int:
        for change in self._in_force:
            length = change.length(self.loader, length)
        return length

    def _choose(self) -> None:
        """Select the latest change of each class."""
        latest = list({type(change): change for change in self.changes}.values())
        if latest != self._in_force and self.changes:
            vars(self.copy).update(without_kept_iterator({}))  # its workers were started with other changes
        self._in_force = latest

    def _refresh(self) -> None:
        """Update the copy with the loader's current attributes, which the loop may have set, and with the changes."""
        attributes = {**vars(self.loader), **own_iterator(self.copy)}
        for change in self._in_force:
            attributes.update(change.attributes(self.loader))
        # Not by assignment, since a DataLoader rejects the assignment of a sampler or a dataset.
        vars(self.copy).update(attributes)


_stand_ins: dict[int, _StandIn] = {}  # by the id of a loader


def _through_copy(original: Callable[[Loader], Iterator[Any]]) -> Callable[[Loader], Iterator[Any]]:
    @functools.wraps(original)
    def iterate(self: Loader) -> Iterator[Any]:
        stand_in = _stand_ins.get(id(self))
        return original(self) if stand_in is None else stand_in.iterate(original)

    return iterate


def _changed_length(original: Callable[[Loader], int]) -> Callable[[Loader], int]:
    @functools.wraps(original)
    def length(self: Loader) -> int:
        stand_in = _stand_ins.get(id(self))
        return original(self) if stand_in is None else stand_in.length(original(self))

    return length
