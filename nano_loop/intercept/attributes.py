"""Replaces attributes of classes and modules during a run, and restores them exactly.

The user's objects are unchanged (`type(layer) is nn.Linear`, `copy.deepcopy`, `pickle`) only if nothing is attached to
the objects themselves. So the replacement is attached to the class, once, and looks the object up in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from nano_loop.intercept.registry import shared_change

_ABSENT = object()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace ``owner.name`` until the last user of the replacement has exited.

    Parameters
    ----------
    owner : type or module
        Subclasses of a class inherit the replacement.
    name : str
        The name of the attribute. If a class inherits it, the replacement is set on the class itself.
    make : callable
        Takes the attribute, as returned by ``getattr(owner, name)``, and returns the replacement. It is called for the
        first user only, so use the same `make` for all replacements of an attribute.
    """
    return shared_change((owner, name), lambda: _replaced(owner, name, make))


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original, replacement = vars(owner).get(name, _ABSENT), make(getattr(owner, name))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        # If other code has wrapped the replacement in the meantime, its wrapper stays. The replacement passes through.
        if vars(owner).get(name) is replacement:
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
