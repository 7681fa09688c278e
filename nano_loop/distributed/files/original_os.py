"""Functions of `os` and `io` for files as they are without nano_loop, their errors, and what stands in their place."""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_NAMES = (
    *("access", "chdir", "chmod", "chown", "getcwd", "getcwdb", "getxattr", "link", "listdir", "listxattr", "lstat"),
    *("mkdir", "open", "readlink", "remove", "removexattr", "rename", "replace", "rmdir", "scandir", "setxattr"),
    *("stat", "statvfs", "symlink", "truncate", "unlink", "utime"),
)

#: What a rank calls to reach the files themselves. Not every system has each of them.
original_os: Any = SimpleNamespace(
    **{name: getattr(os, name) for name in _NAMES if hasattr(os, name)},
    open_file=io.open,
    rmtree=shutil.rmtree,
)


def lower(path: str) -> os.stat_result | None:
    """Return the `os.lstat` of the file at a path, or None."""
    try:
        status: os.stat_result = original_os.lstat(path)
    except OSError:
        return None
    return status


def os_error(number: int, path: Any, target: Any = None) -> OSError:
    """Return the error of Python for a path."""
    return OSError(number, os.strerror(number), path, None, target)


def missing(path: Any) -> OSError:
    """Return the error of Python where there is no file."""
    return os_error(errno.ENOENT, path)


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
