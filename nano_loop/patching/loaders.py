"""Changes to loaders, applied to a private copy that is iterated instead, so the loader itself is never changed.

`DataLoader.__iter__` and `DataLoader.__len__` are replaced while a run changes any loader. The replacements look the
loader up in a table and call the original if it is not there. Overrides in subclasses, which may keep one endless
iterator or implement their own iteration, are replaced as well. Several changes to one loader compose: each one defines
the attributes that it overrides on the copy. Loaders that were not passed are detected when the run's thread uses them.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from nano_loop.patching.attributes import replaced
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.patch_table import listening, process_wide, value_in_force
from nano_loop.patching.torch_private_loaders import kept_iterator, stop_kept_workers, with_iterator
from nano_loop.patching.walk import walk

Loader = DataLoader[Any]
#: Starts the iteration of a loader.
Start = Callable[[], Iterator[Any]]


class ClassIteration(NamedTuple):
    """The iteration of a loader, by its copy `proxy`, by its class's ``__iter__``, whose iterator `start` returns."""

    proxy: _LoaderProxy
    start: Start

    def whole(self) -> Iterator[Any]:
        """Yield the class's batches. Its code sees the full length, unless `DataLoader`'s iteration is changed."""
        proxy = self.proxy
        proxy.reading = True
        try:
            iterator = self.start()
            while True:
                proxy.reading = True
                batch = next(iterator, proxy)
                proxy.reading = False
                if batch is proxy:
                    return
                yield batch
        finally:
            proxy.reading = False


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

    def iterate_class(self, loader: Loader, iteration: ClassIteration) -> Iterator[Any]:
        """Return the loop's iterator for a loader whose class overrides ``__iter__``."""
        return iteration.start()

    def length(self, loader: Loader, length: int) -> int:
        """Return the number of batches. `length` is the number without this change."""
        return length


@contextmanager
def changed(loader: Loader, change: LoaderChange) -> Iterator[None]:
    """Apply a change to the iteration of a loader. The loader itself is not changed.

    The context does not keep the loader alive; exit it when the loader is freed. When the loader's last change ends,
    the worker processes that the copy keeps between epochs (``persistent_workers``) are stopped. Workers that the
    loader started earlier are not affected.
    """
    key, reference = id(loader), weakref.ref(loader)
    with _loaders_intercepted():
        if key not in _proxies:
            _proxies[key] = _LoaderProxy(loader)
        del loader
        _proxies[key].add(change)
        try:
            yield
        finally:
            _end_change(key, reference, change)


def _end_change(key: int, loader: weakref.ref[Loader], change: LoaderChange) -> None:
    if loader() is None:
        # An iteration can outlive its loader (``for x in DataLoader(…)``), so its workers are not stopped.
        _proxies.pop(key, None)
        return
    proxy = _proxies[key]
    proxy.remove(change)
    if not proxy.changes:
        del _proxies[key]
        stop_kept_workers(proxy.copy)


@contextmanager
def implicit_loaders_changed(
    find: Callable[[Loader], LoaderChange | None], *, in_all_threads: bool = False
) -> Iterator[None]:
    """Change loaders on first use in the body if they have no change yet, in this thread or in all threads.

    `find` returns a loader's change, or None, and is called for each iteration and length until it returns one.
    """
    finding = _Finding(find, in_all_threads)
    with _loaders_intercepted(), closing(finding), listening(implicit_loaders_changed, finding):
        yield


@contextmanager
def _loaders_intercepted() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(replaced(DataLoader, "__iter__", _through_copy))
        stack.enter_context(replaced(DataLoader, "__len__", _changed_length))
        for kind in walk(DataLoader.__subclasses__(), type.__subclasses__):
            for name, make in (("__iter__", _through_class), ("__len__", _changed_length)):
                if name in vars(kind):
                    stack.enter_context(replaced(kind, name, make))
        yield


class _LoaderProxy:
    """A copy of a loader, with its changes."""

    def __init__(self, loader: Loader) -> None:
        # Neither `copy.copy`, which caches on the class and calls its pickling methods, nor __init__.
        self.copy: Loader = object.__new__(type(loader))
        vars(self.copy).update(with_iterator(vars(loader)))
        self.process = os.getpid()  # forked processes use the loader itself
        self.was_iterated = False  # by DataLoader's own __iter__, so that its batches are already changed
        self.reading = False  # True while a class's own __iter__ runs
        self.lengths = 0  # the number of calls of `length`
        self.changes: list[LoaderChange] = []
        self._in_force: list[LoaderChange] = []

    def add(self, change: LoaderChange) -> None:
        self.changes.append(change)
        self._choose()

    def remove(self, change: LoaderChange) -> None:
        self.changes.remove(change)
        self._choose()

    def iterate(self, loader: Loader, original: Callable[[Loader], Iterator[Any]]) -> Iterator[Any]:
        self.was_iterated = True
        self._refresh(loader)
        start: Start = functools.partial(original, self.copy)
        for change in self._in_force:
            start = functools.partial(change.iterate, loader, start)
        return start()

    def iterate_class(self, loader: Loader, original: Callable[[Loader], Iterator[Any]]) -> Iterator[Any]:
        start: Start = functools.partial(original, loader)
        for change in self._in_force:
            start = functools.partial(change.iterate_class, loader, ClassIteration(self, start))
        return start()

    def length(self, loader: Loader, length: int) -> int:
        if self.reading and not self.was_iterated:
            return length
        for change in self._in_force:
            length = change.length(loader, length)
        return length

    def _choose(self) -> None:
        """Select the latest change of each class."""
        latest = list({type(change): change for change in self.changes}.values())
        if latest != self._in_force and self.changes:
            vars(self.copy).update(with_iterator({}))  # existing workers were started with other changes
        self._in_force = latest

    def _refresh(self, loader: Loader) -> None:
        """Update the copy with the loader's current attributes, which the loop may have set, and with the changes."""
        attributes = with_iterator(vars(loader), kept_iterator(self.copy))
        for change in self._in_force:
            attributes.update(change.attributes(loader))
        # Bypass __setattr__, because a DataLoader rejects assignments to its sampler or dataset.
        vars(self.copy).update(attributes)
        object.__setattr__(self.copy, "__class__", type(loader))


class _Finding:
    """The loaders that a thread has used, with their changes."""

    def __init__(self, find: Callable[[Loader], LoaderChange | None], in_all_threads: bool) -> None:
        process, thread = _this_thread()
        self.owner = process, None if in_all_threads else thread
        self._find = find
        self._proxies: Any = WeakIdKeyDictionary()  # `_LoaderProxy` by loader

    def proxy(self, loader: Loader) -> _LoaderProxy | None:
        """Return the copy of a loader, looking for a change if it has none yet."""
        proxy: _LoaderProxy | None = self._proxies.get(loader)
        if proxy is None and (change := self._find(loader)) is not None:
            proxy = self._proxies[loader] = _LoaderProxy(loader)
            proxy.add(change)
        return proxy

    def close(self) -> None:
        for proxy in self._proxies.values():
            stop_kept_workers(proxy.copy)
        self._proxies.clear()


_proxies: dict[int, _LoaderProxy] = process_wide("proxies of loaders, by loader", {})


def _this_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()  # a forked process has the same thread id


def _finding() -> _Finding | None:
    """Return the `_Finding` of this thread's innermost run."""
    findings: list[_Finding] = value_in_force(implicit_loaders_changed) or []
    process, thread = _this_thread()
    owners = (process, thread), (process, None)
    return next((finding for finding in reversed(findings) if finding.owner in owners), None)


def _proxy_of(loader: Loader) -> _LoaderProxy | None:
    if id(loader) not in _proxies and (finding := _finding()) is not None:
        implicit = finding.proxy(loader)
        if implicit is not None:
            return implicit
    proxy = _proxies.get(id(loader))
    return proxy if proxy is not None and proxy.process == os.getpid() else None


def _through_copy(original: Callable[[Loader], Iterator[Any]]) -> Callable[[Loader], Iterator[Any]]:
    @functools.wraps(original)
    def iterate(self: Loader) -> Iterator[Any]:
        proxy = _proxy_of(self)
        return original(self) if proxy is None else proxy.iterate(self, original)

    return iterate


def _through_class(original: Callable[[Loader], Iterator[Any]]) -> Callable[[Loader], Iterator[Any]]:
    @functools.wraps(original)
    def iterate(self: Loader) -> Iterator[Any]:
        proxy = _proxy_of(self)
        if proxy is None or proxy.reading:  # a subclass called its base class
            return original(self)
        return proxy.iterate_class(self, original)

    return iterate


def _changed_length(original: Callable[[Loader], int]) -> Callable[[Loader], int]:
    @functools.wraps(original)
    def length(self: Loader) -> int:
        proxy = _proxy_of(self)
        if proxy is None:
            return original(self)
        before = proxy.lengths
        length = original(self)
        if proxy.lengths != before:
            return length  # a subclass called its base class
        proxy.lengths += 1
        return proxy.length(self, length)

    return length
