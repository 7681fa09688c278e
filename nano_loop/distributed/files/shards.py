"""Files of ranks other than 0 that are parts of joint output of all ranks, such as checkpoint shards.

A library that knows its rank puts its number into file names: ``__1_0.distcp`` next to rank 0's ``__0_0.distcp``,
``model-00002-of-00002`` next to ``model-00001-of-00002``. Such a file is moved from the rank's private files to its
actual path at the next synchronization of the ranks: by then rank 0 has written its own.
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
    """The possible path of rank 0 for a path of another rank: the rank number is replaced by 0, or rank + 1 by 1."""

    path: str
    named: str  # the file or folder on this path whose name contains the number
    own: str  # the same for the other rank
    #: The prefix of that rank's paths and their continuation up to later numbers, which rank 0 need not have.
    family: str


def counterparts(path: str, rank: int) -> Iterator[Counterpart]:
    """Yield the possible paths of rank 0 for a path of this rank."""
    for match in _NUMBER.finditer(path):
        digits, (start, end) = match[0], match.span()
        first = int(digits) - rank
        if first not in (0, 1):
            continue
        family = path[:end] + _NUMBER.sub("#", path[end:])
        own = path[:end] + path[end:].partition("/")[0]
        for number in {str(first).zfill(len(digits)), *([] if digits.startswith("0") else [str(first)])}:
            other = path[:start] + number + path[end:]
            slash = other.find("/", start)
            yield Counterpart(other, other if slash < 0 else other[:slash], own, family)


class Shards:
    """The files of one rank that may be shards, and those that have been moved.

    A rank that picks the first free number of a series writes no shard: it has seen rank 0's files. Nor does a rank
    that has itself written rank 0's path, as in each epoch. Nor is a folder's number a rank if the rank works in it, or
    if rank 0 also writes to it: the folder with the other number is another run's, as in a sweep.
    """

    def __init__(self, overlay: Any) -> None:
        self._overlay = overlay
        self._lock = threading.Lock()
        self.latest = self._last = 0  # numbers of writes of possible shards
        # By path: the value of `latest` at the write, and the files of rank 0 known to the rank at that time.
        self.waiting: dict[str, tuple[int, set[str]]] = {}
        self._known: set[str] = set()  # paths of rank 0's files and folders that this rank knew of before
        self._families: set[str] = set()
        self._published: dict[str, tuple[int, int]] = {}  # devices and inodes by path, including folders

    def note(self, key: str) -> None:
        """Record that the rank writes a private file."""
        folder = f"{self._overlay.working_folder()}/"
        others = counterparts(key, self._overlay.rank)
        named = {other.named for other in others if not folder.startswith(f"{other.own}/")}
        _, known = self.waiting.pop(key, (0, set() if key in self._published else named & self._known))
        if named - known:
            self.latest += 1
            self.waiting[key] = self.latest, known

    def note_known(self, key: str) -> None:
        """Record that the rank has seen a file created by rank 0."""
        self._known.add(key)

    def own(self, key: str, status: os.stat_result) -> bool:
        """Whether a file of the caller was put there by this rank."""
        return self._published.get(key) == (status.st_dev, status.st_ino)

    def move(self, after: int = 0) -> None:
        """Move the files written after the first `after` writes that have a counterpart of rank 0."""
        with self._lock:  # a thread that saves in the background also calls collectives
            waiting = {
                key: [
                    other
                    for other in counterparts(key, self._overlay.rank)
                    if other.named not in known and not self._is_rank_0_in(other.own, key)
                ]
                for key, (number, known) in [*self.waiting.items()]
                if number > after and self._is_movable(key)
            }
            for others in waiting.values():
                self._families.update(other.family for other in others if self._overlay.is_rank_0s(other.path))
            for key, others in waiting.items():
                if any(other.family in self._families for other in others):
                    self._overlay.past_kernel(partial(self._move, key))

    def move_latest(self) -> None:
        """Move the files written since the last call."""
        last, self._last = self._last, self.latest
        self.move(last)

    def remove(self, key: str) -> bool:
        """Remove a file that this rank has put among the caller's; return False if it is not its own."""
        status = lower(key)
        if status is None or not self.own(key, status):
            return False
        self._overlay.past_kernel(partial(_delete, key))
        return True

    def _is_movable(self, key: str) -> bool:
        """Whether there is a private file, and rank 0 has not written its target path in this run."""
        private, status = lower(self._overlay.root + key), lower(key)
        if private is None or not stat.S_ISREG(private.st_mode):
            return False
        return status is None or self.own(key, status) or status.st_ctime_ns < self._overlay.since

    def _is_rank_0_in(self, folder: str, key: str) -> bool:
        """Whether rank 0 has written a file in a folder, or in a subfolder on the way to a path, in this run."""
        while len(key) > len(folder):
            key = os.path.dirname(key)
            for name in original_os.listdir(key) if lower(key) is not None else ():
                status = original_os.lstat(path := f"{key}/{name}")
                is_new = not stat.S_ISDIR(status.st_mode) and status.st_ctime_ns >= self._overlay.since
                if is_new and not self.own(path, status):
                    return True
        return False

    def _move(self, key: str) -> None:
        place = self._overlay.root + key
        self._make_folder(os.path.dirname(key))
        try:
            original_os.rename(place, key)  # processes that have it open continue to write to it
            is_complete = True
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(place, key)
            is_complete = not _is_open(place)  # otherwise it is copied again at the end
            if is_complete:
                original_os.unlink(place)
        if is_complete:
            self.waiting.pop(key, None)
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
    """Copy a file to another disk, where it appears atomically."""
    copy = f"{os.path.dirname(key)}/.nano_loop-{os.getpid()}"
    with original_os.open_file(place, "rb") as source, original_os.open_file(copy, "wb") as target:
        shutil.copyfileobj(source, target)
    original_os.chmod(copy, stat.S_IMODE(original_os.stat(place).st_mode))
    original_os.replace(copy, key)


def _delete(path: str) -> None:
    """Delete a file or folder, unlike `shutil.rmtree`, which uses the overlay."""
    if stat.S_ISDIR(original_os.lstat(path).st_mode):
        for name in original_os.listdir(path):
            _delete(f"{path}/{name}")
        original_os.rmdir(path)
    else:
        original_os.unlink(path)


def _is_open(place: str) -> bool:
    """Whether this process may have a file open, such as a log."""
    descriptors = "/proc/self/fd"
    if lower(descriptors) is None:  # not Linux
        return True
    for number in original_os.listdir(descriptors):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if original_os.readlink(f"{descriptors}/{number}") == place:
                return True
    return False
