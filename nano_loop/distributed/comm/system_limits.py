"""Explains which system limit caused an error, such as the limits of open files and disk space."""

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
# Thresholds for blaming inodes or disk space after an error, since some files may have been deleted since then.
_FEW_INODES, _ROOM = 16, 1 << 20
_NO_COPY = "a numpy.memmap is sent without a copy"


def limit_in_words(error: OSError, folder: Path) -> tuple[str, str] | None:
    """Return the limit that an error on writing to `folder` names, and advice, for an error message; or None."""
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may open {most:,} files and pipes at a time", "Close some, or raise the limit (ulimit -n)"
    if error.errno == errno.EAGAIN:
        advice = "End some, or raise the limit (ulimit -u, or the container's)"
        return "this user or container has reached its limit of processes", advice
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"files of this process may have at most {most:,} bytes", f"Raise the limit (ulimit -f); {_NO_COPY}"
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
        advice = "Set TMPDIR to a folder with free space"
    return limit, f"{advice}; {_NO_COPY}"


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise an OSError if the system refuses it, for which Python raises a RuntimeError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error


@contextmanager
def limits_in_words(what: str, folder: Path) -> Iterator[None]:
    """Raise a NanoError that names the limit if the body raises an OSError because of a system limit."""
    try:
        yield
    except OSError as error:
        words = limit_in_words(error, folder)
        if words is None:
            raise
        raise NanoError(error_message(f"{what} ({error.strerror})", *words)) from error
