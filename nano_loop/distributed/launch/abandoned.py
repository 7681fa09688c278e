"""Folders of processes that were killed: other processes delete them, those of the same run or of the next one.

A process holds a lock on its folder, which the system releases when it ends. The number in the folder's name alone does
not tell: containers that share memory number their processes independently.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_loop.distributed.files.folder import discard_workers_files

_ENDED = ("Z", "X")  # states of processes
_locks: set[int] = set()  # the descriptors of this process


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder for the body; give False if another process has it, or it is not this user's folder."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            _locks.add(descriptor)
            stack.callback(_close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            is_held = os.path.samestat(status, folder.lstat()) and status.st_uid == os.geteuid()
        except OSError:  # it is gone or locked, or its file system has no locks
            is_held = False
        yield is_held


def delete_abandoned(parent: Path, prefix: str) -> None:
    """Delete what processes of this user have left in a folder when they were killed.

    Parameters
    ----------
    parent : Path
        Where the private folders of runs are.
    prefix : str
        What their names begin with; the number of the process that has made one follows.
    """
    for folder in parent.glob(f"{prefix}[0-9]*-*"):
        process = folder.name[len(prefix) :].partition("-")[0]
        if not (process.isdecimal() and has_ended(int(process))):
            continue
        with held(folder) as is_held:
            if is_held:
                discard_workers_files(folder, prefix)
                shutil.rmtree(folder, ignore_errors=True)


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or is there only for its parent to ask how it has ended."""
    if not os.path.exists(f"/proc/{process}"):
        return os.path.exists("/proc/self")
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in _ENDED
    return False


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor in _locks:
            _locks.remove(descriptor)
            os.close(descriptor)


# A process that a rank has forked, such as a loader's worker, may live longer than the rank.
os.register_at_fork(after_in_child=lambda: _close(*_locks))
