"""What a worker sees at a path: the caller's file, a private copy, or nothing.

The private copy of ``/data/best.pt`` lies at ``<root>/data/best.pt``. Paths are looked up with all symbolic links
resolved, so that two names of one file have one copy.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable
from typing import Any

from nano_loop.distributed.files.changes import PRIVATE, SHOWN_THROUGH, Change, Changes
from nano_loop.distributed.files.originals import real

#: What the system makes files of, and shared memory.
SYSTEM = ("/dev/", "/proc/", "/sys/")
_NOWHERE = "/proc/self/nowhere"
_NEVER = 1 << 63  # later than all files
_MOST_FOLDERS = 10_000  # that are kept in mind as resolved
_MOST_LINKS = 40  # that lead to one another, as in the kernel


class Overlay:
    """The private copies of one worker and its forked processes, over the files of the caller.

    Before `begin`, as in the process that workers are forked from, every file is shared: nothing is copied.
    """

    def __init__(self) -> None:
        self.root = _NOWHERE
        self.changes = Changes()
        self.since = _NEVER
        self.lock = threading.RLock()
        self._shared: tuple[str, ...] = ("/",)
        self._folders: dict[str, str] = {}
        try:
            self.cwd = real.getcwd()
        except FileNotFoundError:  # it has been deleted
            self.cwd = _NOWHERE

    def begin(self, place: str, since: int, shared: Iterable[str] = ()) -> None:
        """Copy what is changed from now on.

        Parameters
        ----------
        place : str
            An existing folder without symbolic links in its path, for the copies.
        since : int
            When the run began, in ns, by the clock of the file systems. What of the caller's has changed since then,
            rank 0 has changed.
        shared : iterable of str
            Folders whose files all ranks write, such as caches.
        """
        self.root = f"{place}/files"
        real.mkdir(self.root, 0o700)
        self.changes.begin(f"{place}/journal")
        self.since = since
        self._shared = (*SYSTEM, *(f"{folder}/" for folder in (place, *shared)))
        self._folders.clear()
        self.cwd = real.getcwd()

    # --- paths ---

    def key(self, path: str, follow: bool = True, links: int = 0) -> str:
        """Return the absolute path without symbolic links; that of a link itself unless `follow`.

        Raises
        ------
        OSError
            If the worker sees no folder that it could be in.
        """
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if not path.startswith("/"):
            path = f"{self.cwd}/{path}"
        if path.startswith(SYSTEM):  # where links lead to what has no path, such as a pipe
            return path
        above, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            return self._folder(path, links) or "/"
        key = f"{self._folder(above, links)}/{name}"
        target = self._link(key) if follow else None
        return key if target is None else self.key(os.path.join(os.path.dirname(key), target), True, links + 1)

    def _folder(self, path: str, links: int) -> str:
        """Return a folder without symbolic links, and the root folder as an empty string."""
        known = self._folders.get(path)
        if known is not None:
            return known
        above, _, name = path.rpartition("/")
        if name == "":
            return self._folder(above, links) if above else ""
        found = self._folder(above, links)
        if name == "..":
            return found.rpartition("/")[0]
        if name != ".":
            found = self.key(f"{found}/{name}", True, links).rstrip("/")
        seen = self.seen(found or "/")
        if seen is None:
            raise missing(path)
        if not stat.S_ISDIR(seen.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if len(self._folders) >= _MOST_FOLDERS:
            self._folders.clear()
        self._folders[path] = found
        return found

    def forget_folders(self) -> None:
        """Resolve folders anew: one of them may be another now."""
        self._folders.clear()

    def _link(self, key: str) -> str | None:
        place = self.place(key)
        try:
            # The fast answer for what is no link, which nearly everything is: an exception of readlink takes longer.
            if place is None or not stat.S_ISLNK(real.lstat(place).st_mode):
                return None
            return os.fsdecode(real.readlink(place))
        except OSError:
            return None

    def is_shared(self, key: str) -> bool:
        """Whether a file is no rank's own: of the system, of a cache, or of the run."""
        return f"{key}/".startswith(self._shared) or "/__pycache__/" in key

    # --- what there is ---

    def place(self, key: str) -> str | None:
        """Return where that lies which the worker sees at a resolved path; None where it has removed it."""
        change = self.changes.get(key)
        if change is None:
            return key if self._is_reached(key) else None
        if change == PRIVATE:
            return self.root + key
        found = lower(key)
        if change == SHOWN_THROUGH:
            return key if found is not None and stat.S_ISDIR(found.st_mode) else self.root + key
        return None if found is None or identity(found) == change else key

    def _is_reached(self, key: str) -> bool:
        """Whether what the caller has at a path is in the folder that the worker sees there."""
        above = key.rpartition("/")[0]
        if self.changes.get(above) != PRIVATE:
            return True
        found = lower(above)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def seen(self, key: str) -> os.stat_result | None:
        """Return the `os.lstat` of what the worker sees at a resolved path, or None."""
        place = self.place(key)
        return None if place is None else lower(place)

    def names(self, key: str) -> list[str]:
        """Return the names of what the worker sees in a folder."""
        names = _names(key)
        if self.changes.get(key) is None:
            return names
        theirs = (name for name in names if self.place(os.path.join(key, name)) is not None)
        return [*dict.fromkeys((*theirs, *_names(self.root + key)))]

    def is_rank_0s(self, key: str, found: os.stat_result | None) -> bool:
        """Whether rank 0 has made, in this run, what the worker sees.

        The worker may be later than rank 0 in the loop that both run, and must not stumble over what it has not done
        yet.
        """
        change = self.changes.get(key)
        made_again = isinstance(change, list)
        return found is not None and (made_again or (change is None and found.st_ctime_ns >= self.since))

    def has_rank_0_removed(self, path: str) -> bool:
        """Whether what is not there may have been removed by rank 0 in this run: its folder has changed since."""
        path, found = os.path.join(self.cwd, path), None
        while found is None:
            path = os.path.dirname(path)
            found = lower(path)
        return bool(found.st_ctime_ns >= self.since)

    # --- for reading ---

    def reading(self, path: Any, follow: bool = True) -> Any:
        """Return what to read instead of a path: the same where the worker has changed nothing on the way there.

        Raises
        ------
        FileNotFoundError
            If the worker has removed what is there.
        """
        self.refresh()
        if not self.changes or (follow and self._is_untouched(path)):
            return path
        name = os.fsdecode(path)
        key = self.key(name, follow)
        place = self.place(key)
        if place is None:
            raise missing(path)
        if place is key and (key == name or key == f"{self.cwd}/{name}"):
            return path
        return os.fsencode(place) if isinstance(path, bytes) else place

    def _is_untouched(self, path: Any) -> bool:
        """Whether a path surely leads to the caller's file; the quick answer for nearly all that is read."""
        if type(path) is not str:
            return False
        path = path if path.startswith("/") else f"{self.cwd}/{path}"
        above, _, name = path.rpartition("/")
        return (
            self._folders.get(above) == above
            and name not in ("", ".", "..")
            and self.changes.get(path) is None
            and self.changes.get(above) != PRIVATE
            and self._link(path) is None
        )

    def refresh(self) -> None:
        """Take in what the processes have changed that share this overlay."""
        if self.changes.shared:
            with self.lock:
                if self.changes.refresh():
                    self.forget_folders()

    def share_in_child(self) -> None:
        """Let a process that was forked go on, whatever other threads of its parent were doing."""
        self.lock = threading.RLock()
        self.changes.share()

    def virtual(self, place: str) -> str:
        """Return the path that the worker knows what lies at a place by."""
        return place[len(self.root) :] or "/" if f"{place}/".startswith(f"{self.root}/") else place


def lower(path: str) -> os.stat_result | None:
    """Return the `os.lstat` of what is at a path, or None."""
    try:
        found: os.stat_result = real.lstat(path)
    except OSError:
        return None
    return found


def identity(found: os.stat_result) -> Change:
    """Return what tells a file from another one, written later, of the same name."""
    return [found.st_dev, found.st_ino, found.st_ctime_ns]


def missing(path: Any) -> FileNotFoundError:
    """Return the error of Python where there is no file."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _names(folder: str) -> list[str]:
    try:
        names: list[str] = real.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names
