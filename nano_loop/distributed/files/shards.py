"""The parts that ranks other than 0 have of what all ranks write together, such as the shards of a checkpoint.

A library that knows its rank has its number in the names of its files: ``__1_0.distcp`` beside rank 0's
``__0_0.distcp``, ``model-00002-of-00002`` beside ``model-00001-of-00002``. Such a file is moved from the private files
of its rank to where its path says, when the ranks meet the next time: by then rank 0 has written its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from nano_loop.distributed.files.original_os import lower, original_os

_NUMBER = re.compile(r"\d+")


class Counterpart(NamedTuple):
    """What rank 0 may have where another rank has a path: a number is 0 in place of the rank, or 1 in place of it + 1.

    Attributes
    ----------
    path : str
        The path.
    named : str
        The file or folder in it that has the number in its name.
    family : str
        What the paths of that rank begin with, and how they go on but for later numbers, which rank 0 need not have.
    """

    path: str
    named: str
    family: str


def counterparts(path: str, rank: int) -> Iterator[Counterpart]:
    """Yield what rank 0 may have where a rank has a path."""
    for match in _NUMBER.finditer(path):
        digits, (start, end) = match[0], match.span()
        first = int(digits) - rank
        if first not in (0, 1):
            continue
        family = path[:end] + _NUMBER.sub("#", path[end:])
        for number in {str(first).zfill(len(digits)), *([] if digits.startswith("0") else [str(first)])}:
            other = path[:start] + number + path[end:]
            slash = other.find("/", start)
            yield Counterpart(other, other if slash < 0 else other[:slash], family)


class Shards:
    """The files of one rank that may be such parts, and those that have been moved.

    A rank that chooses the first free number of a series is no part of anything: it has seen what rank 0 has. Nor
    is one that has written itself what rank 0 has, as at each epoch.

    Parameters
    ----------
    overlay : Overlay
        The private files of the rank.

    Attributes
    ----------
    latest : int
        How often a file was written that may be one.
    """

    def __init__(self, overlay: Any) -> None:
        self._overlay = overlay
        self._lock = threading.Lock()
        self.latest = self._last = 0
        # By their paths, which write of `latest` it was, and what of rank 0's files the rank knew by then.
        self._waiting: dict[str, tuple[int, set[str]]] = {}
        self._known: set[str] = set()  # paths of rank 0's files, also of folders, that this rank knew of before
        self._families: set[str] = set()
        self._published: dict[str, tuple[int, int]] = {}  # devices and inodes, by their paths; also of folders

    @property
    def are_waiting(self) -> bool:
        """Whether any file is left that may be one."""
        return bool(self._waiting)

    def note(self, key: str) -> None:
        """Note that the rank writes a private file."""
        named = {other.named for other in counterparts(key, self._overlay.rank)}
        _, known = self._waiting.pop(key, (0, set() if key in self._published else named & self._known))
        if named - known:
            self.latest += 1
            self._waiting[key] = self.latest, known

    def note_known(self, key: str) -> None:
        """Note that the rank has seen what rank 0 has made."""
        self._known.add(key)

    def own(self, key: str, status: os.stat_result) -> bool:
        """Whether a file of the caller's is one that this rank has put there."""
        return self._published.get(key) == (status.st_dev, status.st_ino)

    def move(self, after: int = 0) -> None:
        """Move what rank 0 has counterparts of, of the files that were written after so many."""
        with self._lock:  # a thread that saves in the background has collectives, too
            waiting = {
                key: [other for other in counterparts(key, self._overlay.rank) if other.named not in known]
                for key, (number, known) in [*self._waiting.items()]
                if number > after and self._is_movable(key)
            }
            for others in waiting.values():
                self._families.update(other.family for other in others if self._overlay.is_rank_0s(other.path))
            for key, others in waiting.items():
                if any(other.family in self._families for other in others):
                    self._overlay.past_kernel(partial(self._move, key))

    def move_latest(self) -> None:
        """Move those that were written since the last time."""
        last, self._last = self._last, self.latest
        self.move(last)

    def remove(self, key: str) -> bool:
        """Remove what this rank has put among the caller's files; return False where that is not its own."""
        status = lower(key)
        if status is None or not self.own(key, status):
            return False
        self._overlay.past_kernel(partial(_delete, key))
        return True

    def _is_movable(self, key: str) -> bool:
        """Whether there is a private file, and nothing where it belongs that rank 0 has written in this run."""
        private, status = lower(self._overlay.root + key), lower(key)
        if private is None or not stat.S_ISREG(private.st_mode):
            return False
        return status is None or self.own(key, status) or status.st_ctime_ns < self._overlay.since

    def _move(self, key: str) -> None:
        place = self._overlay.root + key
        self._make_folder(os.path.dirname(key))
        try:
            original_os.rename(place, key)  # what has it open goes on writing to it
            is_complete = True
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(place, key)
            is_complete = not _is_open(place)  # else it is copied once more, at the end
            if is_complete:
                original_os.unlink(place)
        if is_complete:
            self._waiting.pop(key, None)
        self._note_moved(key)

    def _make_folder(self, folder: str) -> None:
        if lower(folder) is None:
            self._make_folder(os.path.dirname(folder))
            original_os.mkdir(folder)
            self._note_moved(folder)

    def _note_moved(self, key: str) -> None:
        status = original_os.lstat(key)
        self._published[key] = status.st_dev, status.st_ino


def _copy(place: str, key: str) -> None:
    """Copy a file to another disk, where it appears at once."""
    copy = f"{os.path.dirname(key)}/.nano_loop-{os.getpid()}"
    with original_os.open_file(place, "rb") as source, original_os.open_file(copy, "wb") as target:
        shutil.copyfileobj(source, target)
    original_os.chmod(copy, stat.S_IMODE(original_os.stat(place).st_mode))
    original_os.replace(copy, key)


def _delete(path: str) -> None:
    """Delete a file or a folder, as `shutil.rmtree`, which asks the overlay, does not."""
    if stat.S_ISDIR(original_os.lstat(path).st_mode):
        for name in original_os.listdir(path):
            _delete(f"{path}/{name}")
        original_os.rmdir(path)
    else:
        original_os.unlink(path)


def _is_open(place: str) -> bool:
    """Whether this process may have a file open, as a log."""
    descriptors = "/proc/self/fd"
    if lower(descriptors) is None:  # not Linux
        return True
    for number in original_os.listdir(descriptors):
        with contextlib.suppress(FileNotFoundError):  # that of the list
            if original_os.readlink(f"{descriptors}/{number}") == place:
                return True
    return False
