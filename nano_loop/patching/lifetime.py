"""Cleanup tied to the user's objects. Runs hold these weakly, so an object that the loop drops is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from torch.utils import weak

Owner = TypeVar("Owner")


class _IdRef(weak.WeakIdRef):
    """A weak reference that, unlike torch's, reads no attribute of its referent: a model's code may raise."""

    __slots__ = ()

    def __call__(self) -> Any:
        return weakref.ref.__call__(self)


class WeakIdKeyDictionary(weak.WeakIdKeyDictionary):
    """A dictionary keyed weakly by the identity of non-tensor objects. It calls none of their code."""

    def __init__(self) -> None:
        super().__init__(ref_type=_IdRef)


def undone_with(owner: object, undoing: ExitStack) -> ExitStack:
    """Return an exit stack that is closed when `owner` is freed, or with `undoing` before that.

    Tables keyed by object id need this, since ids are reused. The stack must not keep `owner` alive.
    """
    stack = ExitStack()
    finalizer = weakref.finalize(owner, stack.close)
    finalizer.atexit = False
    undoing.callback(finalizer)
    return stack


def weakly(function: Callable[[Owner], object], owner: Owner) -> Callable[[], None]:
    """Return a function that calls ``function(owner)``, unless `owner` has been freed."""
    reference = weakref.ref(owner)

    def call() -> None:
        alive = reference()
        if alive is not None:
            function(alive)

    return call
