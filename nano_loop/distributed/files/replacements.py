"""Functions and classes that look like the ones that they replace: by name, signature, pickling and `isinstance`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_Function = Callable[..., Any]


class Replacement(staticmethod):  # type: ignore[type-arg]
    """A function that a class does not bind, as it does not bind builtin ones, and that is pickled by its name.

    Parameters
    ----------
    function : callable
        What is done.
    original : callable
        What it is done instead of, whose signature and documentation it has.
    module : str
        Where the name of the original leads to it.
    """

    def __init__(self, function: _Function, original: Any, module: str) -> None:
        super().__init__(functools.wraps(original)(functools.partial(function)))
        self.__module__ = module

    def __reduce__(self) -> str:
        """Return the name. Another process finds its own replacement by it."""
        return str(self.__name__)


def replaced_class(original: type, module: str, make: _Function | None = None, **namespace: Any) -> type:
    """Return a class that replaces another one, also in `isinstance`.

    Parameters
    ----------
    original : type
        The other one.
    module : str
        Where its name leads to it.
    make : callable, optional
        Makes its instances. By default it is a subclass, with `namespace`.
    """

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **options: Any) -> Any:
            return make(*args, **options) if make and cls is made else super().__call__(*args, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is made else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original) if cls is made else type.__subclasscheck__(cls, subclass)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    names = {"__module__": module, "__qualname__": original.__qualname__, "__doc__": original.__doc__, **namespace}
    made = Kind(original.__name__, () if make else (original,), names)
    return made
