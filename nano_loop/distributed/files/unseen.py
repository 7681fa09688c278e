"""A warning where a worker changes a file of the caller's in a way that has not been redirected."""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from nano_loop.distributed.files.overlay import Overlay
from nano_loop.errors import NanoWarning, problem
from nano_loop.intercept.thread_depth import ThreadDepth

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of `sys.addaudithook`, with the positions of the paths of what is changed.
_EVENTS = {
    **{f"os.{name}": (0,) for name in ("chmod", "chown", "mkdir", "remove", "rmdir", "setxattr", "truncate", "utime")},
    "open": (0,),
    "os.link": (1,),
    "os.rename": (0, 1),
    "os.symlink": (1,),
    "sqlite3.connect": (0,),
}
_NO_FOLDER = -1  # the descriptor in an event where a path is not meant from an open folder on


#: Entered while this thread opens a private copy by the name of the caller's file.
redirected = ThreadDepth()


def warn_of_unseen_changes(overlay: Overlay) -> None:
    """Warn once, for as long as this process lives, of the first change of a file that the overlay has not met."""
    warned: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or warned or redirected.depth:
            return
        for path in _changed_paths(event, arguments):
            if _is_of_the_caller(overlay, path):
                warned.append(path)
                given = f"a worker changes {path} in a way that nano_loop does not redirect ({event})"
                advice = "Guard it with nano_loop.is_global_zero()"
                warnings.warn(problem(given, "only rank 0 writes files", advice), NanoWarning, stacklevel=2)
                return

    sys.addaudithook(hook)


def _changed_paths(event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return
    from_folder = event != "open" and isinstance(arguments[-1], int) and arguments[-1] != _NO_FOLDER
    for position in _EVENTS[event]:
        path = arguments[position]
        if isinstance(path, (str, bytes, os.PathLike)):
            path = os.fsdecode(path)
            if not path.startswith((":", "file:")) and path and (os.path.isabs(path) or not from_folder):
                yield path


def _is_of_the_caller(overlay: Overlay, path: str) -> bool:
    try:
        key = path if overlay.is_shared(path) else overlay.key(path)
    except OSError:  # it cannot be changed either
        return False
    if overlay.is_shared(key):
        return False
    seen = overlay.seen(key)
    return seen is None or stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)
