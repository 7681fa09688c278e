"""The functions of `os` and `io` that change or read files, as they were before a worker has replaced them."""

from __future__ import annotations

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
