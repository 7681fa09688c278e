"""What a rank sees at a path: its private files, over those of the caller.

The words are those of overlay file systems. The lower file is the caller's. The upper one is private: its path is that
of the lower one, below a folder of the rank. A whiteout there is a link that says what the rank has removed. So the
dict from real paths to private ones is a folder, and processes that the rank forks, such as a loader's, share it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from threading import get_ident
from typing import Any, TypeVar

from nano_loop.distributed.files.original_os import lower, missing, original_os, os_error
from nano_loop.distributed.files.shards import Shards

Result = TypeVar("Result")

#: What the system makes files of, and shared memory.
SYSTEM = ("/dev/", "/proc/", "/sys/")
_WHITEOUT = "/proc/self/removed by this rank:"
_NEVER = 1 << 63  # ctime sentinel: no file is newer
_MOST_LINKS = 40  # that lead to one another, as in the kernel


class Overlay:
    """The private files of a rank, and of the processes that it forks.

    Before `begin` and after `end` every file is shared: the functions do what Python's do.

    Attributes
    ----------
    root : str
        The folder of the private files; empty while there are none.
    shared : tuple of str
        Folders whose files all ranks write, with a slash at their ends.
    rank : int
        Whose files they are.
    shards : Shards
        Those of them that belong to the caller.
    temporary : str
        A folder for temporary files, which are real ones.
    since : int
        When the run began, in ns, by the clock of the file systems. What of the caller's has changed since then, rank 0
        has changed.
    databases : set of str
        The caller's databases that were opened, for reading alone.
    outside : executor or None
        A thread that may do what the kernel refuses to the others of this process: to write to the caller's pipes.
    """

    def __init__(self) -> None:
        self.databases: set[str] = set()
        self.outside: Executor | None = None
        self.end()

    def begin(self, rank: int, place: str, temporary: str, since: int, shared: Iterable[str]) -> None:
        """Keep what is written from now on private.

        Parameters
        ----------
        rank : int
            See above.
        place : str
            An existing folder without symbolic links in its path, for the files.
        temporary, since : str, int
            See above.
        shared : iterable of str
            Folders whose files all ranks write, such as caches.
        """
        root = f"{place}/files"
        original_os.mkdir(root, 0o700)
        self.rank, self.root, self.temporary, self.since = rank, root, temporary, since
        self.shared = (*SYSTEM, *(f"{folder}/" for folder in (place, *shared)))

    def end(self) -> None:
        """Let every file be shared again."""
        self.root, self.temporary, self.shared, self.since, self._is_used = "", "", ("/",), _NEVER, False
        self.rank, self.shards = 0, Shards(self)

    @property
    def is_empty(self) -> bool:
        """Whether no file is private, so that nothing need be looked up."""
        self._is_used = self._is_used or bool(self.root and _names(self.root))
        return not self._is_used

    def past_kernel(self, change: Callable[[], Result]) -> Result:
        """Do what the kernel refuses to this thread."""
        return self.outside.submit(change).result() if self.outside else change()

    def is_shared(self, key: str) -> bool:
        """Whether a file is no rank's own: of the system, of a cache, or of the run."""
        return f"{key}/".startswith(self.shared)

    # --- what is at a path ---

    def key(self, path: Any, follow: bool = True) -> str:
        """Return the absolute path without symbolic links, as the rank sees it; that of a link itself unless `follow`.

        Raises
        ------
        OSError
            If the rank sees no folder that it could be in.
        """
        return self.resolved(path, follow)[0]

    def reading(self, path: Any, follow: bool = True) -> Any:
        """Return what to read instead of a path.

        Raises
        ------
        FileNotFoundError
            If the rank has removed what is there.
        """
        if self.is_empty and not self._is_new(lower(path)):
            return path
        place = self.resolved(path, follow)[1]
        if place is None:
            raise missing(path)
        return os.fsencode(place) if isinstance(path, bytes) else place

    def resolved(self, path: Any, follow: bool = True) -> tuple[str, str | None]:
        """Return the absolute path without symbolic links, and where the file lies that the rank sees there."""
        path = os.fsdecode(path)
        if path.startswith(SYSTEM):  # where links lead to what has no path, such as a pipe
            return path, path
        if not path:
            raise missing(path)
        path = path if path.startswith("/") else f"{self.working_folder()}/{path}"
        names = path.split("/")[::-1]
        key, links = "", 0
        place: str | None = "/"
        while names:
            name = names.pop()
            if name in ("", "."):
                continue
            step = key.rpartition("/")[0] if name == ".." else f"{key}/{name}"
            place, status = self.at(step or "/")
            kind = 0 if status is None else stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFLNK and (names or follow):
                target, links = os.fsdecode(original_os.readlink(place)), links + 1
                if links > _MOST_LINKS:
                    raise os_error(errno.ELOOP, path)
                if target.startswith(SYSTEM):
                    return (os.path.join(target, *names[::-1]),) * 2
                names += target.split("/")[::-1]
                key = "" if target.startswith("/") else key
            elif names and kind != stat.S_IFDIR:
                raise os_error(errno.ENOTDIR if kind else errno.ENOENT, path)
            else:
                key = step
                if place == key and self._is_new(status):
                    self.shards.note_known(key)
        return key or "/", place

    def at(self, key: str) -> tuple[str | None, os.stat_result | None]:
        """Return where that lies which the rank sees at a resolved path, None if it has removed it, and its status."""
        (upper, whiteout), status = self._upper(key), lower(key)
        if upper is not None and not (_is_folder(upper) and _is_folder(status)):
            return self.root + key, upper
        if whiteout is not None and (status is None or _identity(status) == whiteout):
            return None, None
        return key, status

    def seen(self, key: str) -> os.stat_result | None:
        """Return the `os.lstat` of the file that the rank sees at a resolved path, or None."""
        return self.at(key)[1]

    def _upper(self, key: str) -> tuple[os.stat_result | None, str | None]:
        """Return the `os.lstat` of the private file at a path, or the identity of a file that was removed there."""
        status = lower(self.root + key) if self.root else None
        if status is None or not stat.S_ISLNK(status.st_mode):
            return status, None
        target: str = original_os.readlink(self.root + key)
        return (None, target[len(_WHITEOUT) :]) if target.startswith(_WHITEOUT) else (status, None)

    def names(self, key: str) -> list[str] | None:
        """Return the names that the rank sees in a folder; None where it has nothing there."""
        if not _is_folder(self._upper(key)[0]):
            return None
        upper = original_os.listdir(self.root + key)
        names = dict.fromkeys((*_names(key), *upper))
        return [name for name in names if name not in upper or self.seen(os.path.join(key, name)) is not None]

    def working_folder(self) -> str:
        """Return the working folder, as the rank knows it."""
        place: str = original_os.getcwd()
        return place[len(self.root) :] or "/" if self.root and f"{place}/".startswith(f"{self.root}/") else place

    # --- what rank 0 has done before this rank, which is later in the loop that both run ---

    def is_rank_0s(self, key: str) -> bool:
        """Whether rank 0 has made, in this run, what this rank sees, and this one has nothing there."""
        (upper, whiteout), status = self._upper(key), self.seen(key)
        if upper is not None or status is None or self.shards.own(key, status):
            return False
        return whiteout is not None or self._is_new(status)

    def _is_new(self, status: os.stat_result | None) -> bool:
        return status is not None and status.st_ctime_ns >= self.since

    def has_rank_0_removed(self, path: str) -> bool:
        """Whether rank 0 may have removed a missing file in this run: its folder has changed since the start."""
        path, status = os.path.join(self.working_folder(), path), None
        if lower(self.root + path) is not None:  # this rank has removed it
            return False
        while status is None:
            path = os.path.dirname(path)
            status = lower(path)
        return bool(status.st_ctime_ns >= self.since)

    # --- changes ---

    def new(self, key: str) -> str:
        """Return the place of a private file that is written anew, whatever there was before."""
        if self.is_shared(key):
            return key
        self.shards.note(key)
        self._upper_folder(os.path.dirname(key))
        if self._upper(key)[1] is not None:
            original_os.unlink(self.root + key)
        return self.root + key

    def _upper_folder(self, key: str) -> str:
        """Return the private folder over one that the rank sees. It stays until the rank removes it."""
        place, (upper, whiteout) = self.root + key, self._upper(key)
        if _is_folder(upper):
            return place
        if upper is not None or whiteout is not None:  # rank 0 has made a folder there
            original_os.unlink(place)
        else:
            self._upper_folder(os.path.dirname(key))
        with contextlib.suppress(FileExistsError):
            original_os.mkdir(place)
        return place

    def writing(self, path: Any) -> Any:
        """Return what to write anew instead of a path."""
        key = self.key(path)
        status = self.seen(key)
        return self.new(key) if status is None or stat.S_ISREG(status.st_mode) else path

    def copy_up(self, key: str) -> str:
        """Return the place of a private copy of a file or a link; that of what cannot be copied, such as a folder."""
        place, status = self.at(key)
        if place is None or status is None:
            raise missing(key)
        if place == key and stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFLNK) and not self.is_shared(key):
            place = self.new(key)
            copy = f"{self.temporary}/{os.getpid()}-{get_ident()}.copy"
            shutil.copy2(key, copy, follow_symlinks=False)
            with contextlib.suppress(FileExistsError):  # another process or thread of this rank was faster
                original_os.link(copy, place, follow_symlinks=False)
            original_os.unlink(copy)
        return place

    def copy_up_tree(self, key: str) -> str:
        """Return the place of a private copy of a file, or of a folder with all that the rank sees in it."""
        if not _is_folder(self.seen(key)) or self.is_shared(key):
            return self.copy_up(key)
        place = self._upper_folder(key)
        for name in self.names(key) or ():
            self.copy_up_tree(os.path.join(key, name))
        return place

    def make_folder(self, key: str, mode: int) -> None:
        """Make a folder, which the rank does not see yet."""
        if self.is_shared(key):
            original_os.mkdir(key, mode)
            return
        was_removed = self._upper(key)[1] is not None
        with contextlib.suppress(FileExistsError):
            original_os.mkdir(self.new(key), mode)
        if was_removed:
            self._hide_below(key)

    def move(self, old: str, new: str) -> None:
        """Let the rank see at a path, where it sees nothing yet, what it sees at another one."""
        original_os.rename(self.copy_up_tree(old), self.new(new))
        if _is_folder(self._upper(new)[0]):
            self._hide_below(new)
        self._note(new)
        self.remove(old)

    def follow(self, old: str, new: str) -> None:
        """Let the rank see at a path, to which rank 0 has renamed a folder, its own files of that folder, too."""
        original_os.rename(self.root + old, self.new(new))
        self._note(new)

    def _note(self, key: str) -> None:
        """Note the private files at a path and below."""
        if not _is_folder(self._upper(key)[0]):
            self.shards.note(key)
        for name in _names(self.root + key):
            self._note(os.path.join(key, name))

    def remove(self, key: str) -> None:
        """Let the rank see nothing at a path."""
        if _is_folder(self._upper(key)[0]):
            original_os.rmtree(self.root + key)
        elif lower(self.root + key) is not None:
            original_os.unlink(self.root + key)
        if not self.shards.remove(key):
            self._hide(key)

    def _hide(self, key: str) -> None:
        status = lower(key)
        if status is not None:
            original_os.symlink(_WHITEOUT + _identity(status), self.new(key))

    def _hide_below(self, key: str) -> None:
        """Let the rank see nothing of the caller's below its own folder, which it has put in the place of another."""
        for name in _names(key):
            path = os.path.join(key, name)
            upper = self._upper(path)[0]
            if upper is None:
                self._hide(path)
            elif _is_folder(upper):
                self._hide_below(path)


def _is_folder(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _identity(status: os.stat_result) -> str:
    """Return what tells a file from another one, made later, of the same name."""
    return f"{status.st_dev} {status.st_ino} {status.st_ctime_ns}"


def _names(folder: str) -> list[str]:
    try:
        names: list[str] = original_os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names
