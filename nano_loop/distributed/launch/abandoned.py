"""Folders of runs of which every process was killed at once: nobody was left to delete them, so the next run does.

A run holds a lock on its folder, which the system releases when its process ends. The number in the folder's name alone
does not tell: containers that share memory number their processes independently.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_loop.distributed.files.folder import discard, links_of


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder for the body; give False if another process has it, or it is not this user's folder."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(descriptor), folder.lstat()) and _belongs_to_this_user(folder)
        except OSError:  # it is gone or locked, or its file system has no locks
            is_held = False
        yield is_held


def delete_abandoned(parent: Path, prefix: str) -> None:
    """Delete what runs of this user have left in a folder when all of their processes were killed.

    Parameters
    ----------
    parent : Path
        Where the private folders of runs are.
    prefix : str
        What their names begin with; the number of the process that has made one follows.
    """
    for folder in parent.glob(f"{prefix}[0-9]*-*"):
        process = folder.name[len(prefix) :].partition("-")[0]
        if os.path.exists(f"/proc/{process}") or not os.path.exists("/proc/self"):
            continue
        with held(folder) as is_held:
            if is_held:
                _delete(folder, prefix)


def _delete(folder: Path, prefix: str) -> None:
    for link in links_of(folder):
        with contextlib.suppress(OSError):
            place = link.readlink()
            if place.name.startswith(prefix) and _belongs_to_this_user(place):
                discard(place)
    shutil.rmtree(folder, ignore_errors=True)


def _belongs_to_this_user(folder: Path) -> bool:
    status = folder.lstat()
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
