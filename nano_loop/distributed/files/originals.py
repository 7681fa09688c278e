"""The functions of `os` and `io` for files as they are without nano_loop, and the errors that they raise."""

from __future__ import annotations

import errno
import io
import os
from types import SimpleNamespace
from typing import Any

#: Functions of `os` that take paths. Not every system has each of them.
NAMES = (
    *("access", "chdir", "chflags", "chmod", "chown", "getcwd", "getcwdb", "getxattr", "lchflags", "lchmod"),
    *("lchown", "link", "listdir", "listxattr", "lstat", "mkdir", "mkfifo", "mknod", "open", "pathconf", "readlink"),
    *("remove", "removexattr", "rename", "replace", "rmdir", "scandir", "setxattr", "stat", "statvfs", "symlink"),
    *("truncate", "unlink", "utime"),
)

real: Any = SimpleNamespace(
    **{name: getattr(os, name) for name in NAMES if hasattr(os, name)}, open_file=io.open, FileIO=io.FileIO
)


def lower(path: str) -> os.stat_result | None:
    """Return the `os.lstat` of the real file at a path, or None."""
    try:
        status: os.stat_result = real.lstat(path)
    except OSError:
        return None
    return status


def missing(path: Any) -> OSError:
    """Return the error of Python where there is no file."""
    return os_error(errno.ENOENT, path)


def os_error(number: int, path: Any, target: Any = None) -> OSError:
    """Return the error of Python for a path."""
    if target is not None:
        return OSError(number, os.strerror(number), path, None, target)
    return OSError(number, os.strerror(number), path)
