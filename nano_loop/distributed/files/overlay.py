"""A rank's view of the file system: its private files, over those of the caller.

The terms are those of overlay file systems. The lower file is the caller's. The upper one is private: it has the lower
file's path below a folder of the rank. A whiteout is a link there that marks a path as removed by the rank. So the
mapping from real to private paths is a folder, which forked processes, such as a loader's workers, share.
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

#: Device files and shared memory of the system.
SYSTEM = ("/dev/", "/proc/", "/sys/")
_WHITEOUT = "/proc/self/removed by this rank:"
_NEVER = 1 << 63  # ctime sentinel: no file is newer
_MOST_LINKS = 40  # maximum number of nested links, as in the kernel


class Overlay:
    """The private files of a rank and its forks. Outside of `begin` and `end`, every file is shared."""

    root: str  # the folder of the private files; empty while there are none
    shared: tuple[str, ...]  # folders whose files all ranks write, with a trailing slash
    rank: int  # the owner of the files
    shards: Shards  # the private files that belong to the caller
    temporary: str  # a folder for temporary files, which are real
    #: The start of the run in ns, by the file system clock: rank 0 has changed the caller's files that changed later.
    since: int

    def __init__(self) -> None:
        self.databases: set[str] = set()  # those of the caller that were opened read-only
        #: A thread that the kernel does not restrict, unlike the others: it can write to the caller's pipes.
        self.outside: Executor | None = None
        self.end()

    def begin(self, rank: int, place: str, temporary: str, since: int, shared: Iterable[str]) -> None:
        """Make all writes private from now on, in `place`, a resolved path, except in `shared` folders, as caches."""
        root = f"{place}/files"
        original_os.mkdir(root, 0o700)
        self.rank, self.root, self.temporary, self.since = rank, root, temporary, since
        self.shared = (*SYSTEM, *(f"{folder}/" for folder in (place, *shared)))

    def end(self) -> None:
        """Share every file again."""
        self.root, self.temporary, self.shared, self.since, self._is_used = "", "", ("/",), _NEVER, False
        self.rank, self.shards = 0, Shards(self)

    @property
    def is_empty(self) -> bool:
        """Whether no file is private, so that lookups can be skipped."""
        self._is_used = self._is_used or bool(self.root and _names(self.root))
        return not self._is_used

    def past_kernel(self, change: Callable[[], Result]) -> Result:
        """Make a change that the kernel denies to this thread."""
        return self.outside.submit(change).result() if self.outside else change()

    def is_shared(self, key: str) -> bool:
        """Whether a file is shared by all ranks: of the system, of a cache, or of the run."""
        return f"{key}/".startswith(self.shared)

    # # --- lookups ---

    def key(self, path: Any, follow: bool = True) -> str:
        """Return the absolute path as the rank sees it, without links, except a final one unless `follow`."""
        return self.resolved(path, follow)[0]

    def reading(self, path: Any, follow: bool = True) -> Any:
        """Return the path to read instead of `path`; raise a FileNotFoundError if the rank has removed the file."""
        if self.is_empty and not self._is_new(lower(path)):
            return path
        place = self.resolved(path, follow)[1]
        if place is None:
            raise missing(path)
        return os.fsencode(place) if isinstance(path, bytes) else place

    def resolved(self, path: Any, follow: bool = True) -> tuple[str, str | None]:
        """Return the absolute path without symbolic links, and the location of the file that the rank sees there."""
        path = os.fsdecode(path)
        if path.startswith(SYSTEM):  # links there can lead to unnamed files, such as pipes
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
        """Return the location of the file seen at a resolved path, None if the rank has removed it, and its status."""
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
        """Return the names that the rank sees in a folder; None if it has nothing private there."""
        if not _is_folder(self._upper(key)[0]):
            return None
        upper = original_os.listdir(self.root + key)
        names = dict.fromkeys((*_names(key), *upper))
        return [name for name in names if name not in upper or self.seen(os.path.join(key, name)) is not None]

    def working_folder(self) -> str:
        """Return the working folder as seen by the rank."""
        place: str = original_os.getcwd()
        return place[len(self.root) :] or "/" if self.root and f"{place}/".startswith(f"{self.root}/") else place

    # # --- changes by rank 0, which is further along in the same loop ---

    def is_rank_0s(self, key: str) -> bool:
        """Whether the file that this rank sees was created by rank 0 in this run and has no private version."""
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
        """Return the location for a new private file, replacing any previous one."""
        if self.is_shared(key):
            return key
        self.shards.note(key)
        self._upper_folder(os.path.dirname(key))
        if self._upper(key)[1] is not None:
            original_os.unlink(self.root + key)
        return self.root + key

    def _upper_folder(self, key: str) -> str:
        """Return the private folder over one that the rank sees. It exists until the rank removes it."""
        place, (upper, whiteout) = self.root + key, self._upper(key)
        if _is_folder(upper):
            return place
        if upper is not None or whiteout is not None:  # rank 0 has created a folder there
            original_os.unlink(place)
        else:
            self._upper_folder(os.path.dirname(key))
        with contextlib.suppress(FileExistsError):
            original_os.mkdir(place)
        return place

    def writing(self, path: Any) -> Any:
        """Return the path to write to instead of `path`, for a new file."""
        key = self.key(path)
        status = self.seen(key)
        return self.new(key) if status is None or stat.S_ISREG(status.st_mode) else path

    def copy_up(self, key: str) -> str:
        """Return the path of a private copy of a file or link; other kinds, such as folders, are not copied."""
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
        """Return a private copy of a file, or of a folder with everything that the rank sees in it."""
        if not _is_folder(self.seen(key)) or self.is_shared(key):
            return self.copy_up(key)
        place = self._upper_folder(key)
        for name in self.names(key) or ():
            self.copy_up_tree(os.path.join(key, name))
        return place

    def make_folder(self, key: str, mode: int) -> None:
        """Make a folder that the rank does not see yet."""
        if self.is_shared(key):
            original_os.mkdir(key, mode)
            return
        was_removed = self._upper(key)[1] is not None
        with contextlib.suppress(FileExistsError):
            original_os.mkdir(self.new(key), mode)
        if was_removed:
            self._hide_below(key)

    def move(self, old: str, new: str) -> None:
        """Make the rank see the file at `old` at the path `new`, where it sees nothing yet."""
        original_os.rename(self.copy_up_tree(old), self.new(new))
        if _is_folder(self._upper(new)[0]):
            self._hide_below(new)
        self._note(new)
        self.remove(old)

    def follow(self, old: str, new: str) -> None:
        """After rank 0 has renamed a folder, make the rank see its own files of that folder there as well."""
        original_os.rename(self.root + old, self.new(new))
        self._note(new)

    def _note(self, key: str) -> None:
        """Record the private files at a path and below it."""
        if not _is_folder(self._upper(key)[0]):
            self.shards.note(key)
        for name in _names(self.root + key):
            self._note(os.path.join(key, name))

    def remove(self, key: str) -> None:
        """Make the rank see nothing at a path."""
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
        """Hide the caller's files below a folder of the rank's own that replaces another one."""
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
    """Return a value that distinguishes a file from a later one with the same name."""
    return f"{status.st_dev} {status.st_ino} {status.st_ctime_ns}"


def _names(folder: str) -> list[str]:
    try:
        names: list[str] = original_os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names
