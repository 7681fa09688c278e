"""Changes of the caller's files that no replaced function has seen: they are errors, which are explained."""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import linecache
import os
import re
import stat
import sys
import traceback
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FrameType
from typing import Any

from nano_loop.distributed.files.functions import WRITING, redirected
from nano_loop.distributed.files.originals import lower, real
from nano_loop.distributed.files.table import Table
from nano_loop.errors import NanoError, error_message

# Events of `sys.addaudithook`, with the positions of the paths of what is changed.
_EVENTS = {
    **{f"os.{name}": (0,) for name in ("chmod", "chown", "remove", "setxattr", "truncate", "utime")},
    "open": (0,),
    "os.link": (1,),
    "os.rename": (0, 1),
    "os.symlink": (1,),
    "sqlite3.connect": (0,),
}
_NO_FOLDER = -1  # the descriptor in an event where a path is not meant from an open folder on
_MOST_TEXT = 10_000  # characters
_OF_SQLITE = re.compile("readonly database|unable to open database")
_DENIED = re.compile(r"permission denied|read-only file", re.IGNORECASE)
_MISSING = re.compile(r"no such file|not found|does not exist|unable to open|cannot open", re.IGNORECASE)
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"|`([^`]+)`|(/[^\s:'\",]+)")
_ONE_RULE = "only rank 0 writes your files, and what another rank writes is its own, which compiled code does not see"
_ADVICE = "Do it on rank 0 alone: if nano_loop.is_global_zero()"
_ROOM = "what a worker writes needs room there until the run ends"
_MAKE_ROOM = "Make room, set TMPDIR to a folder on a larger disk, or write on rank 0 alone (nano_loop.is_global_zero())"
_LITTLE = 1 << 20  # bytes that are free on a disk that is as good as full
# Expressions that can be computed once more: they change nothing.
_PURE = (
    *(ast.Name, ast.Constant, ast.BinOp, ast.Add, ast.Div, ast.JoinedStr, ast.FormattedValue, ast.Attribute),
    *(ast.Load, ast.Subscript),
)


@functools.cache
def refuse_unseen_changes(table: Table) -> None:
    """Raise where the caller's files would be changed by a function that no table is asked by, while there is a table.

    Such a hook of Python's cannot be taken away.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not table.root or table.is_rank_0 or event not in _EVENTS or redirected.depth:
            return
        for path in _changed_paths(event, arguments):
            if _is_of_the_caller(table, path):
                message = _message(f"compiled code, or a function from before the run, changes {path} ({event})")
                raise PermissionError(errno.EACCES, message)

    sys.addaudithook(hook)


def _message(what: str) -> str:
    return error_message(what, _ONE_RULE, _ADVICE)


def _changed_paths(event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    if event == "open" and not _writes(arguments):
        return
    from_folder = event != "open" and isinstance(arguments[-1], int) and arguments[-1] != _NO_FOLDER
    for position in _EVENTS[event]:
        path = arguments[position]
        if isinstance(path, (str, bytes, os.PathLike)):
            path = os.fsdecode(path)
            if not path.startswith((":", "file:")) and path and (os.path.isabs(path) or not from_folder):
                yield path


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Whether the event of an opened file is of one that is opened for more than reading."""
    return isinstance(arguments[2], int) and bool(arguments[2] & WRITING)


def _is_of_the_caller(table: Table, path: str) -> bool:
    try:
        key = table.key(path)
    except OSError:  # it cannot be changed either
        return False
    if table.is_shared(key) or "/__pycache__/" in key:
        return False
    status = table.seen(key)
    return status is None or stat.S_ISREG(status.st_mode)


@contextlib.contextmanager
def explaining_files(table: Table) -> Iterator[None]:
    """Let the errors of a rank say which disk is full, and which file compiled code could not open, and what to do.

    Raises
    ------
    OSError
        Instead of the one for which there was no room, and instead of torch's, which names no reason.
    NanoError
        Instead of that of compiled code.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NanoError) or not table.root:
            raise
        if _is_for_lack_of_room(table, error):
            got = f"the disk of {table.root} is full ({error})"
            raise OSError(errno.ENOSPC, error_message(got, _ROOM, _MAKE_ROOM)) from error
        text = _explained(table, error)
        if text is None:
            raise
        raise NanoError(_message(f"{text} ({type(error).__name__}: {_text(error)})")) from error


def _is_for_lack_of_room(table: Table, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not isinstance(error, RuntimeError):
        return False
    disk = os.statvfs(table.root)
    return disk.f_bavail * disk.f_frsize < _LITTLE


def _text(error: Exception) -> str:
    """Return the beginning of an error's message; none of one that has no sound message."""
    try:
        return str(error)[:_MOST_TEXT]
    except Exception:  # the user's class may raise any
        return ""


def _explained(table: Table, error: Exception) -> str | None:
    number, text = error.errno if isinstance(error, OSError) else None, _text(error)
    if _OF_SQLITE.search(text) and table.read_only:
        return f"compiled code, SQLite, writes to {' or '.join(sorted(table.read_only))}"
    is_denied = number in (errno.EACCES, errno.EROFS) or bool(_DENIED.search(text))
    if not is_denied and number != errno.ENOENT and not _MISSING.search(text):
        return None
    paths = [path for path in _paths(error) if path not in ("", ".", "/")]
    keys = _keys_of_ranks(table, paths)
    if not is_denied:
        own = next((key for key in keys if _is_own(table, key)), None)
        return own and f"compiled code opened {own}, which this rank has written or renamed"
    refused = next(filter(_may_be_written, keys), None)
    if refused is None and (paths or table.outside is None):
        return None
    return f"compiled code opened {refused or _source(error)} to write it"


def _keys_of_ranks(table: Table, paths: Iterable[str]) -> Iterator[str]:
    """Yield where paths lead to, unless all ranks share it."""
    for path in paths:
        with contextlib.suppress(OSError):
            key = table.key(path)
            if not table.is_shared(key):
                yield key


def _is_own(table: Table, key: str) -> bool:
    """Whether a file, or the folder that it is to be in, is the rank's own."""
    above = os.path.dirname(key)
    return table.place(key) != key or table.place(above) != above


def _may_be_written(key: str) -> bool:
    """Whether the user may write a file, so that it was refused to this process alone."""
    return bool(real.access(key if lower(key) else os.path.dirname(key), os.W_OK))


# --- which file it is: that is in the error, or in the call that has failed ---


def _paths(error: Exception) -> Iterator[str]:
    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)):
        yield os.fsdecode(error.filename)
    for match in _QUOTED.finditer(_text(error)):
        yield next(filter(None, match.groups()))
    for frame, line in _frames(error)[::-1]:
        yield from (path for path in _arguments(frame, line) if path not in _text(error))


def _frames(error: Exception) -> list[tuple[FrameType, int]]:
    """Return where the error has come through, the innermost last, with the lines."""
    return [*traceback.walk_tb(error.__traceback__)]


def _source(error: Exception) -> str:
    frame, line = _frames(error)[-1]
    file = frame.f_code.co_filename
    return f"a file in line {line} of {file} ({linecache.getline(file, line).strip()})"


def _arguments(frame: FrameType, line: int) -> Iterator[str]:
    """Yield the paths that the calls in a line were given, as far as they can be computed once more."""
    with contextlib.suppress(SyntaxError):
        nodes = [*ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename))))]
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0)]
        for node in [*chain(*(call.args for call in calls)), *(word.value for call in calls for word in call.keywords)]:
            if all(isinstance(part, _PURE) for part in ast.walk(node)):
                with contextlib.suppress(Exception):  # of the user's objects
                    value = eval(compile(ast.Expression(node), "", "eval"), frame.f_globals, frame.f_locals)
                    if isinstance(value, (str, os.PathLike)):
                        yield os.fsdecode(value)
