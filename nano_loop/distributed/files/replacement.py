"""A function in place of another one, which looks like it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replacement(staticmethod):  # type: ignore[type-arg]
    """A function that a class does not bind, as it does not bind builtin ones, and that is pickled by its name.

    It is equal to the original, so that it is in sets such as `os.supports_follow_symlinks` where that one is.

    Parameters
    ----------
    function : callable
        What is done.
    original : callable
        What it is done instead of, whose signature and documentation it has.
    module : str
        Where the name of the original leads to it.
    """

    def __init__(self, function: Callable[..., Any], original: Any, module: str) -> None:
        super().__init__(functools.wraps(original)(functools.partial(function)))
        self.__module__, self._original = module, original

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> str:
        """Return the name. Another process finds its own replacement by it."""
        return str(self.__name__)
