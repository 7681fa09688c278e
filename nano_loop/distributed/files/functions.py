"""What a worker's functions are replaced with: called, bound and pickled as the originals are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replacement(staticmethod):  # type: ignore[type-arg]
    """A function that a class does not bind, as it does not bind builtin ones, and that is pickled by its name.

    Parameters
    ----------
    function : callable
        What is done.
    original : callable
        What it is done instead of, whose signature and documentation it has.
    module : str
        Where it is found by the name of the original.
    """

    def __init__(self, function: Callable[..., Any], original: Any, module: str) -> None:
        super().__init__(functools.wraps(original)(function))
        self.__module__ = module

    def __reduce__(self) -> str:
        """Return the name, by which another process finds its own."""
        return str(self.__name__)

    def __repr__(self) -> str:
        return f"<function {self.__module__}.{self.__name__}, redirected in this worker>"


def replaced_class(make: Callable[..., Any], original: type, module: str) -> type:
    """Return a class whose instances are those of the original, as `make` returns them."""

    class Kind(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            return make(*args, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    namespace = {"__module__": module, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return Kind(original.__name__, (), namespace)
