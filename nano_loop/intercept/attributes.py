"""Replaces attributes of classes and modules for as long as a run needs it, and puts back exactly what was there.

A user's objects stay what they are (`type(layer) is nn.Linear`, `copy.deepcopy`, `pickle`) only when nothing is
hung on the objects themselves. So what has to happen on a call is hung on the class, once, and looks the object up
in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from nano_loop.intercept.registry import shared_change

_ABSENT = object()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace ``owner.name`` until the last of those who asked for it has left.

    Parameters
    ----------
    owner : type or module
        Subclasses of a class inherit the replacement.
    name : str
        The attribute. Where a class only inherits it, the class itself gets one for the time.
    make : callable
        Is given the attribute as ``getattr(owner, name)`` finds it, and returns the replacement. It is called
        for the first of several that ask for the same attribute, so one attribute has one maker.
    """
    return shared_change((owner, name), lambda: _replaced(owner, name, make))


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original, replacement = vars(owner).get(name, _ABSENT), make(getattr(owner, name))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        # Where somebody has put their own on top of ours meanwhile, theirs stays: it calls ours, which passes through.
        if vars(owner).get(name) is replacement:
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
