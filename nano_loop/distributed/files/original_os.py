"""The original file functions of `os` and `io`, their errors, and the class of replacements."""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

#: The functions that a rank uses to access files directly: those of `os`, as far as this system has them, and two more.
original_os: Any = SimpleNamespace(**vars(os), open_file=io.open, rmtree=shutil.rmtree)


def lower(path: str) -> os.stat_result | None:
    """Return the `os.lstat` of a path, or None."""
    try:
        status: os.stat_result = original_os.lstat(path)
    except OSError:
        return None
    return status


def os_error(number: int, path: Any, target: Any = None) -> OSError:
    """Return Python's error for a path."""
    return OSError(number, os.strerror(number), path, None, target)


def missing(path: Any) -> OSError:
    """Return Python's error for a missing file."""
    return os_error(errno.ENOENT, path)


class Replacement(staticmethod):  # type: ignore[type-arg]
    """A function that a class does not bind, pickled by its name in `module`, and equal to the original, as in sets."""

    def __init__(self, function: Callable[..., Any], original: Any, module: str) -> None:
        super().__init__(functools.wraps(original)(functools.partial(function)))
        self.__module__, self._original = module, original

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> str:
        """Return the name, by which another process finds its own replacement."""
        return str(self.__name__)
