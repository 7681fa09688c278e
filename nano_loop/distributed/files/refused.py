"""Explains errors of a rank whose compiled code could not open a file, and errors of full disks."""

from __future__ import annotations

import contextlib
import errno
import linecache
import os
import re
import traceback
from collections.abc import Iterator

from nano_loop.distributed.files import functions
from nano_loop.distributed.files.original_os import lower, original_os
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.errors import NanoError, error_message

_MOST_TEXT = 10_000  # characters
_DENIED = re.compile(r"permission denied|read-?only", re.IGNORECASE)
_MISSING = re.compile(r"no such file|not found|does not exist|unable to open|cannot open", re.IGNORECASE)
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"|(/[^\s:'\",]+)")
_ONE_RULE = "only rank 0 writes your files; other ranks' writes are private, and compiled code does not see them"
_ADVICE = "Do it on rank 0 only: if nano_loop.is_global_zero()"
_ROOM = "files written by a worker are stored there until the run ends"
_MAKE_ROOM = "Free space, set TMPDIR to a folder on a larger disk, or write on rank 0 only (nano_loop.is_global_zero())"
_LITTLE = 1 << 20  # free bytes on a disk that is considered full


@contextlib.contextmanager
def explaining_files(overlay: Overlay) -> Iterator[None]:
    """Make errors of a rank name the full disk, as an OSError, or the file that compiled code could not open."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NanoError) or not overlay.root:
            raise
        if _is_for_lack_of_room(overlay, error):
            got = f"the disk of {overlay.root} is full ({error})"
            raise OSError(errno.ENOSPC, error_message(got, _ROOM, _MAKE_ROOM)) from error
        file = _file(overlay, error)
        if file is None:
            raise
        got = f"compiled code cannot open {file} ({type(error).__name__}: {_text(error)})"
        raise NanoError(error_message(got, _ONE_RULE, _ADVICE)) from error


def _is_for_lack_of_room(overlay: Overlay, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    disk = os.statvfs(overlay.root)
    return isinstance(error, RuntimeError) and disk.f_bavail * disk.f_frsize < _LITTLE


def _text(error: Exception) -> str:
    """Return the start of an error's message, or an empty string if it has none."""
    try:
        return str(error)[:_MOST_TEXT]
    except Exception:  # a user's class may raise anything
        return ""


def _file(overlay: Overlay, error: Exception) -> str | None:
    """Return the file that compiled code could not open; None for other errors."""
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
    if any(frame.f_code.co_filename == functions.__file__ for frame, _ in frames):
        return None  # raised by a Python function, which works as without ranks
    number, text = error.errno if isinstance(error, OSError) else None, _text(error)
    if overlay.databases and "database" in text:
        return " or ".join(sorted(overlay.databases))
    is_denied = number in (errno.EACCES, errno.EROFS) or bool(_DENIED.search(text))
    if not is_denied and number != errno.ENOENT and not _MISSING.search(text):
        return None
    named = [os.fsdecode(error.filename)] if isinstance(error, OSError) and error.filename else []
    named += [next(filter(None, match.groups())) for match in _QUOTED.finditer(text)]
    for path in (*named, *(value for frame, _ in frames for value in frame.f_locals.values() if _is_path(value))):
        with contextlib.suppress(Exception):  # not a valid path, or an object of the user's that raises
            key = overlay.key(path)
            folder = os.path.dirname(key)
            is_own = overlay.at(key)[0] != key or overlay.at(folder)[0] != folder
            is_file = is_denied and not os.path.isdir(key)
            # The user may write to it, so only this process was denied.
            is_refused = is_file and original_os.access(key if lower(key) else folder, os.W_OK)
            if not overlay.is_shared(key) and (is_own or is_refused):
                return key
    if named or not is_denied or overlay.outside is None:
        return None
    line, file = frames[0][1], frames[0][0].f_code.co_filename
    return f"a file in line {line} of {file} ({linecache.getline(file, line).strip()})"


def _is_path(value: object) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and os.sep in value)
