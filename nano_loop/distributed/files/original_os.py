"""The functions of `os` and `io` for files as they are without nano_loop, and the errors that they raise."""

from __future__ import annotations

import errno
import io
import os
import shutil
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
    FileIO=io.FileIO,
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
