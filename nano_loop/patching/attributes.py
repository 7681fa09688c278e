"""Replaces attributes of classes and modules during a run, and restores them exactly.

The user's objects are unchanged (`type(layer) is nn.Linear`, `copy.deepcopy`, `pickle`) only if nothing is attached to
the objects themselves. So the replacement is attached to the class, once, and looks the object up in a table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from nano_loop.patching.patch_table import shared_change, values_in_force

_ABSENT = object()


class _Replacement(NamedTuple):
    owner: Any
    name: str
    original: Any
    replacement: Any

    def put(self) -> None:
        setattr(self.owner, self.name, self.replacement)

    def restore(self) -> bool:
        """Restore the original, unless other code has wrapped the replacement in the meantime."""
        if vars(self.owner).get(self.name) is not self.replacement:
            return False
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True


_suspension = threading.RLock()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace ``owner.name`` until the last user of the replacement has exited.

    Parameters
    ----------
    owner : type or module
        Subclasses of a class inherit the replacement.
    name : str
        The name of the attribute. If a class inherits it, the replacement is set on the class itself.
    make : callable
        Takes the attribute, as returned by ``getattr(owner, name)``, or None if there is none, and returns the
        replacement. It is called for the first user only, so use the same `make` for all replacements of an attribute.
    """
    return shared_change((owner, name), lambda: _replaced(owner, name, make))


@contextmanager
def suspended(base: type) -> Iterator[None]:
    """Restore the attributes of `base` and its subclasses for the body, in all threads, for code that reads them."""
    with _suspension:
        restored = [replacement for replacement in _replacements_in(base) if replacement.restore()]
        try:
            yield
        finally:
            for replacement in _replacements_in(base):  # without those whose last user exited in the meantime
                if any(replacement is other for other in restored):
                    replacement.put()


def _replacements_in(base: type) -> list[_Replacement]:
    replacements = (value for value in values_in_force() if isinstance(value, _Replacement))
    return [made for made in replacements if isinstance(made.owner, type) and issubclass(made.owner, base)]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[Any]:
    original = vars(owner).get(name, _ABSENT)
    made = _Replacement(owner, name, original, make(getattr(owner, name, None)))
    made.put()
    try:
        yield made
    finally:
        made.restore()
