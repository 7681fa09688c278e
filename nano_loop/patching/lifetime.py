"""Undos about one of the user's objects, which runs hold weakly: what the loop drops is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from torch.utils import weak

Owner = TypeVar("Owner")


class _IdRef(weak.WeakIdRef):
    """A weak reference that reads no attribute of what it refers to, as torch's does: a model's code may raise."""

    __slots__ = ()

    def __call__(self) -> Any:
        return weakref.ref.__call__(self)


class WeakIdKeyDictionary(weak.WeakIdKeyDictionary):
    """A dictionary by the identity of objects other than tensors, held weakly. None of their code is called."""

    def __init__(self) -> None:
        super().__init__(ref_type=_IdRef)


def undone_with(owner: object, undoing: ExitStack) -> ExitStack:
    """Return a stack of undos that is closed when `owner` is freed, or with `undoing` before that.

    Tables by the id of an object need it: the id may be that of another object afterwards.

    Parameters
    ----------
    owner : object
        A model, an optimizer or a loader. What the stack has may not hold it.
    undoing : contextlib.ExitStack
        The undos of the run.
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
