"""What this system limits, such as open files and room for files: in words, where it has refused more of it."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_loop.errors import NanoError, error_message

SHARED_MEMORY = Path("/dev/shm")
# What makes a file system that has refused a file one without inodes: what was made before may have been deleted since.
_FEW_INODES, _ROOM = 16, 1 << 20
_NO_COPY = "a numpy.memmap is sent without a copy"


def limit_in_words(error: OSError, folder: Path) -> tuple[str, str] | None:
    """Return which limit of the system an error comes from, and what to do about it.

    Parameters
    ----------
    error : OSError
        What was raised.
    folder : Path
        Where files were to be written.

    Returns
    -------
    (str, str) or None
        The second and the third part of a message; None for an error of another kind.
    """
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may open {most:,} files and pipes at a time", "Close some, or raise the limit (ulimit -n)"
    if error.errno == errno.ENFILE:
        return "the system has no room for more open files", "Close programs, or raise the limit (sysctl fs.file-max)"
    if error.errno == errno.EAGAIN:
        advice = "End some, or raise the limit (ulimit -u, or the container's)"
        return "this user or container may have no more processes", advice
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"no file of this process may have more than {most:,} bytes", f"Raise the limit (ulimit -f); {_NO_COPY}"
    if error.errno == errno.EDQUOT:
        return f"this user's quota in {folder} is used up", "Delete files there, or ask for more"
    if error.errno == errno.ENOSPC:
        return _no_room(Path(error.filename).parent if isinstance(error.filename, str) else folder)
    return None


def _no_room(folder: Path) -> tuple[str, str]:
    parent = folder if folder.exists() else folder.parent
    system = os.statvfs(parent)
    total, free = (blocks * system.f_frsize for blocks in (system.f_blocks, system.f_bavail))
    if system.f_files and (not system.f_ffree or (system.f_ffree < _FEW_INODES and free > _ROOM)):
        used = f"{system.f_files - system.f_ffree:,} of" if system.f_ffree else "all"
        limit = f"{used} {system.f_files:,} inodes"
        advice = "Delete files there, or enlarge it (mount -o remount,nr_inodes=...)"
        return f"{limit} of the file system of {parent} are in use", advice
    limit = f"the file system of {parent} has {total:,} bytes, of which {free:,} are free"
    if SHARED_MEMORY in parent.parents or parent == SHARED_MEMORY:
        advice = "Enlarge it (docker run --shm-size=..., mount -o remount,size=... /dev/shm)"
    else:
        advice = "Set TMPDIR to a folder that has room"
    return limit, f"{advice}; {_NO_COPY}"


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise an OSError where the system refuses one, which Python calls a RuntimeError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error


@contextmanager
def limits_in_words(what: str, folder: Path) -> Iterator[None]:
    """Raise a NanoError that says what is limited, where the body raises an OSError for want of something."""
    try:
        yield
    except OSError as error:
        words = limit_in_words(error, folder)
        if words is None:
            raise
        raise NanoError(error_message(f"{what} ({error.strerror})", *words)) from error
