"""The table of a rank's private files: which paths it has written or removed, kept in a folder that mirrors them.

What the rank has written at ``/data/best.pt`` lies at ``<root>/data/best.pt``. A symbolic link there whose target
begins with `_REMOVED` stands for a file that it has removed. So the folder is the table, and forked processes share it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from nano_loop.distributed.files.made_folders import MadeFolders
from nano_loop.distributed.files.originals import lower, missing, os_error, real

#: What the system makes files of, and shared memory.
SYSTEM = ("/dev/", "/proc/", "/sys/")
_REMOVED = "/proc/self/removed by this rank:"
_NEVER = 1 << 63  # later than all files
_MOST_FOLDERS = 10_000  # that are kept in mind
_MOST_LINKS = 40  # that lead to one another, as in the kernel
_CHUNK = 1 << 24


class Table:
    """The private files of a rank, and of the processes that it forks.

    Before `begin` and after `end` every file is shared: the functions do what Python's do.

    Attributes
    ----------
    shared : tuple of str
        Folders whose files all ranks write, with a slash at their ends.
    is_rank_0 : bool
        Whether this is the rank 0 of a trial, whose compiled code may write.
    read_only : set of str
        The caller's databases that were opened for reading alone.
    temporary : str
        A folder for temporary files, which are real ones.
    outside : executor or None
        A thread that may do what the kernel refuses to the others of this process: to change the caller's files.
    """

    def __init__(self) -> None:
        self._changes: Any = memoryview(bytearray(8)).cast("Q")  # how often folders may have become others
        self.read_only: set[str] = set()
        self.outside: Executor | None = None
        self.is_rank_0 = False
        self.end()

    def begin(self, place: str, temporary: str, run: Path, since: int, shared: Iterable[str] = ()) -> None:
        """Keep what is written from now on private.

        Parameters
        ----------
        place : str
            An existing folder without symbolic links in its path, for the files.
        temporary : str
            See above.
        run : pathlib.Path
            The folder of the run, in which ranks tell each other which folders they have made.
        since : int
            When the run began, in ns, by the clock of the file systems. What of the caller's has changed since then,
            rank 0 has changed.
        shared : iterable of str
            Folders whose files all ranks write, such as caches.
        """
        self.root, self.made, self.since = f"{place}/files", MadeFolders(run), since
        self.temporary = temporary
        real.mkdir(self.root, 0o700)
        self._changes = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self.shared = (*SYSTEM, *(f"{folder}/" for folder in (place, *shared)))

    def end(self) -> None:
        """Let every file be shared again."""
        self._changes[0] = 0
        self._folders: dict[str, tuple[str, bool]] = {}
        self._known = 0
        self.root, self.temporary, self.shared, self.since = "", "", ("/",), _NEVER

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it, so that nothing need be looked up."""
        return not self._changes[0]

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
        return self._looked_up(path, follow)[0]

    def _looked_up(self, path: Any, follow: bool) -> tuple[str, str | None]:
        """Return the absolute path without symbolic links, and the place of the file that the rank sees there."""
        path = os.fsdecode(path)
        if path.startswith(SYSTEM):  # where links lead to what has no path, such as a pipe
            return path, path
        if not path.startswith("/"):
            path = f"{self.working_folder()}/{path}"
        above, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            folder = self._folder(path)[0] or "/"
            return folder, self.place(folder)
        return self._resolved(*self._folder(above), [name], path, follow)

    def _folder(self, path: str) -> tuple[str, bool]:
        """Return a folder without symbolic links, the root as an empty string, and whether the rank has some of it."""
        if self._known != self._changes[0] or len(self._folders) > _MOST_FOLDERS:
            self._folders, self._known = {}, self._changes[0]
        if path not in self._folders:
            folder = self._resolved("", True, [*path.split("/"), "."], path)[0].rstrip("/")
            self._folders[path] = folder, self._entry(folder)[0] is not None
        return self._folders[path]

    def _resolved(
        self, folder: str, has_own: bool, names: list[str], path: str, follow: bool = True
    ) -> tuple[str, str | None]:
        """Return where names lead one after the other, all but the last to folders, and the place of the last."""
        rest, links, place = names[::-1], 0, None
        while rest:
            name = rest.pop()
            if name in ("", ".", ".."):
                folder = folder.rpartition("/")[0] if name == ".." else folder
                place = self.place(folder or "/")
                continue
            step = f"{folder}/{name}"
            place, status = self._seen_at(step) if has_own else (step, lower(step))
            kind = 0 if status is None else stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFLNK and (rest or follow):
                target, links = os.path.join(folder, os.fsdecode(real.readlink(place))), links + 1
                if links > _MOST_LINKS:
                    raise os_error(errno.ELOOP, path)
                if target.startswith(SYSTEM):
                    return (os.path.join(target, *rest[::-1]),) * 2
                folder, has_own, rest = "", True, [*rest, *target.split("/")[::-1]]
            elif rest and kind != stat.S_IFDIR:
                raise os_error(errno.ENOTDIR if kind else errno.ENOENT, path)
            else:
                folder = step
        return folder or "/", place

    def place(self, key: str) -> str | None:
        """Return where that lies which the rank sees at a resolved path; None where it has removed it."""
        return self._seen_at(key)[0]

    def seen(self, key: str) -> os.stat_result | None:
        """Return the `os.lstat` of the file that the rank sees at a resolved path, or None."""
        return self._seen_at(key)[1]

    def _seen_at(self, key: str) -> tuple[str | None, os.stat_result | None]:
        own, removed = self._entry(key)
        status = lower(key)
        if own is not None and not (stat.S_ISDIR(own.st_mode) and status is not None and stat.S_ISDIR(status.st_mode)):
            return self.root + key, own
        if removed is not None and (status is None or _identity(status) == removed):
            return None, None
        return key, status

    def _entry(self, key: str) -> tuple[os.stat_result | None, str | None]:
        """Return the `os.lstat` of the rank's own file at a path, or the identity of a file that it removed there."""
        status = lower(self.root + key) if self.root else None
        if status is None or not stat.S_ISLNK(status.st_mode):
            return status, None
        target: str = real.readlink(self.root + key)
        return (None, target[len(_REMOVED) :]) if target.startswith(_REMOVED) else (status, None)

    def names(self, key: str) -> list[str] | None:
        """Return the names that the rank sees in a folder; None where it has nothing there."""
        entry = self._entry(key)[0]
        if entry is None or not stat.S_ISDIR(entry.st_mode):
            return None
        own = real.listdir(self.root + key)
        names = dict.fromkeys((*_names(key), *own))
        return [name for name in names if name not in own or self.seen(os.path.join(key, name)) is not None]

    def is_rank_0s(self, key: str) -> bool:
        """Whether another rank has made, in this run, what this one sees, and this one has nothing there.

        The rank may be later than rank 0 in the loop that both run, and must not stumble over what it has not done yet.
        """
        (own, removed), status = self._entry(key), self.seen(key)
        return own is None and status is not None and (removed is not None or status.st_ctime_ns >= self.since)

    def has_rank_0_removed(self, path: str) -> bool:
        """Whether rank 0 may have removed a missing file in this run: its folder has changed since the start."""
        path, status = os.path.join(self.working_folder(), path), None
        if lower(self.root + path) is not None:  # this rank has removed it
            return False
        while status is None:
            path = os.path.dirname(path)
            status = lower(path)
        return bool(status.st_ctime_ns >= self.since)

    def reading(self, path: Any, follow: bool = True) -> Any:
        """Return what to read instead of a path: the same where it leads to the caller's file.

        Raises
        ------
        FileNotFoundError
            If the rank has removed what is there.
        """
        if self.is_empty:
            return path
        place = self._looked_up(path, follow)[1]
        if place is None:
            raise missing(path)
        return os.fsencode(place) if isinstance(path, bytes) else place

    def working_folder(self) -> str:
        """Return the working folder, as the rank knows it."""
        return self.virtual(real.getcwd())

    def virtual(self, place: str) -> str:
        """Return the path that the rank knows what lies at a place by."""
        return place[len(self.root) :] or "/" if self.root and f"{place}/".startswith(f"{self.root}/") else place

    # --- changes ---

    def new(self, key: str) -> str:
        """Return the place of a private file that is written anew, whatever there was before."""
        if self.is_shared(key):
            return key
        self.mirrored(os.path.dirname(key))
        self._changes[0] = self._changes[0] or 1
        if self._entry(key)[1] is not None:
            real.unlink(self.root + key)
            self.forget_folders()
        return self.root + key

    def mirrored(self, key: str) -> str:
        """Return the place of the rank's own files in a folder that it sees."""
        place, (entry, removed) = self.root + key, self._entry(key)
        if entry is not None and stat.S_ISDIR(entry.st_mode):
            return place
        if entry is not None or removed is not None:  # rank 0 has made it again
            real.unlink(place)
        elif key != "/":
            self.mirrored(os.path.dirname(key))
        with contextlib.suppress(FileExistsError):
            real.mkdir(place)
        self.forget_folders()
        return place

    def forget_folders(self) -> None:
        """Look folders up anew, here and in forked processes: one of them may be another now."""
        self._changes[0] += 1

    def own(self, key: str) -> str:
        """Return the place of a private copy of a file or a link, or the original place where there can be no copy."""
        place, status = self._seen_at(key)
        if place is None or status is None:
            raise missing(key)
        if place == key and stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFLNK) and not self.is_shared(key):
            place = self.new(key)
            _copy(key, place, status)
        return place

    def own_tree(self, key: str) -> str:
        """Return the place of a private copy of a file, or of a folder with all that the rank sees in it."""
        status = self.seen(key)
        if status is None or not stat.S_ISDIR(status.st_mode) or self.is_shared(key):
            return self.own(key)
        place = self.mirrored(key)
        for name in self.names(key) or ():
            self.own_tree(os.path.join(key, name))
        return place

    def make_folder(self, key: str, mode: int) -> None:
        """Make a real folder, which the rank does not see yet."""
        if self._entry(key)[1] is not None:
            names = _names(key)  # of what is in it now, and was removed with it
            real.unlink(self.root + key)
            for name in names:
                self._hide(os.path.join(key, name))
        is_new = self.made.note(key)  # before others see it
        try:
            real.mkdir(key, mode)
        except (FileExistsError, FileNotFoundError, NotADirectoryError):
            if is_new:  # rank 0 has made it, or it has not made the folder above yet
                self.made.forget(key)
        self.mirrored(key)

    def remove(self, key: str) -> None:
        """Let the rank see nothing at a path. A real folder stays, unless no rank but such ones has made it."""
        _delete(self.root + key)
        self._hide(key)
        self.made.note_removed(key)

    def _hide(self, key: str) -> None:
        status = lower(key)
        if status is not None:
            real.symlink(_REMOVED + _identity(status), self.new(key))
        self.forget_folders()


def _identity(status: os.stat_result) -> str:
    """Return what tells a file from another one, made later, of the same name."""
    return f"{status.st_dev} {status.st_ino} {status.st_ctime_ns}"


def _names(folder: str) -> list[str]:
    try:
        names: list[str] = real.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names


def _delete(place: str) -> None:
    status = lower(place)
    if status is not None and stat.S_ISDIR(status.st_mode):
        for name in real.listdir(place):
            _delete(os.path.join(place, name))
        real.rmdir(place)
    elif status is not None:
        real.unlink(place)


def _copy(source: str, target: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        real.symlink(real.readlink(source), target)
        return
    incomplete = f"{target}.copy-{os.getpid()}"
    try:
        with real.open_file(source, "rb") as read, real.open_file(incomplete, "wb") as written:
            shutil.copyfileobj(read, written, _CHUNK)
        real.chmod(incomplete, stat.S_IMODE(status.st_mode) | stat.S_IWUSR)
        real.utime(incomplete, ns=(status.st_atime_ns, status.st_mtime_ns))
        with contextlib.suppress(FileExistsError):  # another process or thread of this rank was faster
            real.link(incomplete, target)
    finally:
        with contextlib.suppress(OSError):
            real.unlink(incomplete)
