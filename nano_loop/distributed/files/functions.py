"""Python's file functions for nonzero ranks. Each function consults the overlay first."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod
from stat import S_IMODE, S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

from nano_loop.distributed.files.original_os import lower, missing, original_os, os_error
from nano_loop.distributed.files.overlay import Overlay

_Function = Callable[..., Any]
_READ_ONLY = frozenset(("r", "rb", "rt", "br", "tr"))
# The flags of `os.open` for anything but reading.
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Functions of `os` that read, and whether they follow symbolic links; most have a parameter for this.
_READING = {"access": True, "getxattr": True, "listxattr": True, "lstat": False, "readlink": False, "stat": True}
_READING |= {"statvfs": True}
_CHANGING = ("chmod", "chown", "removexattr", "setxattr", "truncate", "utime")


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Make errors name the path that the loop passed, not that of the private file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


class Functions:
    """All functions of a rank's private files, each equivalent to Python's. Descriptors of folders are the caller's."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def of_os(self) -> dict[str, _Function]:
        """Return the functions by their names in `os`, as far as this system has them."""
        functions: dict[str, _Function] = {
            **{name: partial(self._read, name, follow) for name, follow in _READING.items()},
            **{name: partial(self._change, name) for name in _CHANGING},
            **dict.fromkeys(("remove", "unlink"), self._remove),
            **dict.fromkeys(("rename", "replace"), self._rename),
            "chdir": self._chdir,
            "getcwd": self._overlay.working_folder,
            "getcwdb": lambda: os.fsencode(self._overlay.working_folder()),
            "link": self._link,
            "listdir": self._listdir,
            "mkdir": self._mkdir,
            "open": self._open,
            "rmdir": partial(self._remove, is_folder=True),
            "scandir": self._scandir,
            "symlink": self._symlink,
        }
        return {
            name: self._redirected(name, function) for name, function in functions.items() if hasattr(original_os, name)
        }

    def _redirected(self, name: str, function: _Function) -> _Function:
        original = getattr(original_os, name)

        def redirected(*args: Any, **options: Any) -> Any:
            path = args[0] if args else options.get("path", options.get("src"))
            folders = [option for option in options if option.endswith("dir_fd")]
            is_open = isinstance(path, int) or any(options[option] is not None for option in folders)
            if is_open or not self._overlay.root:
                return original(*args, **options)
            for option in folders:
                del options[option]
            with naming(path):
                return function(*args, **options)

        return redirected

    # --- reading ---

    def _read(self, name: str, follows: bool, path: Any, *args: Any, **options: Any) -> Any:
        try:
            place = self._overlay.reading(os.fspath(path), follows and options.get("follow_symlinks", True))
        except OSError:
            if name == "access":  # it raises no errors
                return False
            raise
        return getattr(original_os, name)(place, *args, **options)

    def _chdir(self, path: Any) -> None:
        original_os.chdir(self._overlay.reading(os.fspath(path)))

    def _listdir(self, path: Any = None) -> Any:
        names = self._names(path)[1]
        if names is None:
            return original_os.listdir(path)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = None) -> Any:
        key, names = self._names(path)
        if names is None:
            return original_os.scandir(path)
        folder: Any = "." if path is None else os.fspath(path)
        kind: Any = os.fsencode if isinstance(folder, bytes) else os.fsdecode
        return _DirEntries(
            _DirEntry(kind(name), os.path.join(folder, kind(name)), os.path.join(key, name)) for name in names
        )

    def _names(self, path: Any) -> tuple[str, list[str] | None]:
        """Return the path of a folder, and the names in it; None to use Python's function."""
        overlay, folder = self._overlay, os.fsdecode(path or ".")
        if overlay.is_empty:
            return "", None
        key, place = overlay.resolved(folder)
        if place is None:
            raise missing(path)
        names = overlay.names(key)
        if names is None and (place != key or os.path.join(overlay.working_folder(), folder) not in (key, f"{key}/.")):
            names = original_os.listdir(place)  # a link that only this rank sees may be part of the path
        return key, names

    # --- opening ---

    def _open(self, path: Any, flags: int, mode: int = 0o777) -> Any:
        overlay = self._overlay
        path, exclusive = os.fspath(path), flags & os.O_CREAT and flags & os.O_EXCL
        if not flags & _WRITING:
            return original_os.open(overlay.reading(path, not flags & os.O_NOFOLLOW), flags, mode)
        key = overlay.key(path, not (exclusive or flags & os.O_NOFOLLOW))
        if overlay.is_shared(key):
            return original_os.open(key, flags, mode)
        if exclusive:
            self._must_be_new(key, path)
        place, status = overlay.at(key) if not exclusive else (None, None)
        if status is None:
            if not flags & os.O_CREAT:
                raise missing(path)
            return original_os.open(overlay.new(key), flags, mode)
        # A device, a pipe, or the folder of an unnamed file; anything else raises.
        if not S_ISREG(status.st_mode) or overlay.shards.own(key, status):
            return overlay.past_kernel(partial(original_os.open, place, flags, mode))
        if flags & os.O_TRUNC:
            return original_os.open(overlay.new(key), flags | os.O_CREAT, S_IMODE(status.st_mode))
        return original_os.open(overlay.copy_up(key), flags, mode)

    def _opener(self, path: Any, flags: int) -> Any:
        with naming(path):
            return self._open(path, flags, 0o666)

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """See `open`."""
        overlay = self._overlay
        is_real = mode in _READ_ONLY and overlay.is_empty
        if overlay.root and not is_real and not isinstance(file, int):
            opener = opener or self._opener
        return original_os.open_file(file, mode, buffering, encoding, errors, newline, closefd, opener)

    # --- making, changing, removing and renaming ---

    def _mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._overlay.make_folder(self._new_key(path), mode)

    def _symlink(self, src: Any, dst: Any, target_is_directory: bool = False) -> None:
        original_os.symlink(src, self._overlay.new(self._new_key(dst)))

    def _link(self, src: Any, dst: Any, *, follow_symlinks: bool = True) -> None:
        source = self._overlay.key(src, follow=False)
        if self._overlay.seen(source) is None:
            raise missing(src)
        key = self._new_key(dst)
        original_os.link(self._overlay.copy_up(source), self._overlay.new(key), follow_symlinks=follow_symlinks)

    def _new_key(self, path: Any) -> str:
        """Return the resolved path of a new file, which must not be one that the rank has created itself."""
        key = self._overlay.key(_bare(path), follow=False)
        self._must_be_new(key, path)
        return key

    def _must_be_new(self, key: str, path: Any) -> None:
        overlay = self._overlay
        if not overlay.is_shared(key) and overlay.seen(key) is not None and not overlay.is_rank_0s(key):
            raise os_error(errno.EEXIST, path)

    def _change(self, name: str, path: Any, *args: Any, **options: Any) -> Any:
        key = self._overlay.key(path, options.get("follow_symlinks", True))
        if self._overlay.is_shared(key):
            return getattr(original_os, name)(key, *args, **options)
        place = self._overlay.copy_up(key)
        if place == key and S_ISDIR(original_os.lstat(place).st_mode) and name != "truncate":
            return None  # the folder belongs to rank 0
        return getattr(original_os, name)(place, *args, **options)

    def _remove(self, path: Any, is_folder: bool = False) -> None:
        key = self._key_to_remove(path)
        if key is None:
            return
        if self._overlay.is_shared(key):
            (original_os.rmdir if is_folder else original_os.unlink)(key)
            return
        if is_folder:
            self._must_be_empty(key, path)
        elif self._is_folder(key):
            raise os_error(errno.EISDIR, path)
        self._overlay.remove(key)

    def remove_tree(self, path: Any, *args: Any, **options: Any) -> None:
        """See `shutil.rmtree`."""
        key: str | None = ""
        if self._overlay.root and options.get("dir_fd") is None and not isinstance(path, int):
            with contextlib.suppress(OSError):  # Python's function passes these to the loop's error handler
                key = self._key_to_remove(path)
        if key and not self._overlay.is_shared(key) and self._is_folder(key):
            self._overlay.remove(key)
        elif key is not None:
            original_os.rmtree(path, *args, **options)

    def _rename(self, src: Any, dst: Any) -> None:
        overlay = self._overlay
        new = overlay.key(_bare(dst), follow=False)
        old = self._key_to_remove(src, tolerant=overlay.seen(new) is not None)  # rank 0 may have renamed it
        if old is None:
            return
        if overlay.is_shared(old) and overlay.is_shared(new):
            original_os.rename(old, new)
            return
        status, replaced = overlay.seen(old), overlay.seen(new)
        if status is None:
            raise missing(src)
        for number, inner, outer in ((errno.EINVAL, new, old), (errno.ENOTEMPTY, old, new)):
            if inner.startswith(f"{outer}/"):
                raise os_error(number, src, dst)
        if replaced is not None and os.path.samestat(status, replaced):
            return  # renaming between two links to the same file does nothing
        if replaced is not None and S_ISDIR(status.st_mode):
            self._must_be_empty(new, dst)
            if lower(old) is None and overlay.is_rank_0s(new):
                overlay.follow(old, new)
                return
            overlay.remove(new)
        elif replaced is not None and S_ISDIR(replaced.st_mode):
            raise os_error(errno.EISDIR, dst)
        try:
            overlay.move(old, new)
        except FileNotFoundError:
            if lower(old) is not None:
                raise
            self._rename(src, dst)  # rank 0 has renamed it in the meantime

    def _key_to_remove(self, path: Any, tolerant: bool = True) -> str | None:
        """Return the resolved path of a file to remove; None if rank 0 has removed it before, and `tolerant`."""
        with contextlib.suppress(FileNotFoundError):
            key = self._overlay.key(_bare(path), follow=False)
            if self._overlay.is_shared(key) or self._overlay.seen(key) is not None:
                return key
        if not tolerant or not self._overlay.has_rank_0_removed(_bare(path)):
            raise missing(path)
        return None

    def _is_folder(self, key: str) -> bool:
        status = self._overlay.seen(key)
        return status is not None and S_ISDIR(status.st_mode)

    def _must_be_empty(self, key: str, path: Any) -> None:
        """Check that a path is a folder, and contains nothing but files that rank 0 has added in this run."""
        if not self._is_folder(key):
            raise os_error(errno.ENOTDIR, path)
        for name in self._listdir(key):
            if not self._overlay.is_rank_0s(os.path.join(key, name)):
                raise os_error(errno.ENOTEMPTY, path)


class _DirEntry(os.PathLike[Any]):
    """An `os.DirEntry` for a possibly private file; its key is the absolute path."""

    def __init__(self, name: Any, path: Any, key: str) -> None:
        self.name, self.path, self._key = name, path, key

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return os.lstat(self._key).st_ino

    def is_junction(self) -> bool:
        return False  # junctions only exist on Windows

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._key, follow_symlinks=follow_symlinks)

    def _is(self, kind: Any, *, follow_symlinks: bool = True) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow_symlinks).st_mode))
        except FileNotFoundError:
            return False

    is_dir = partialmethod(_is, S_ISDIR)
    is_file = partialmethod(_is, S_ISREG)
    is_symlink = partialmethod(_is, S_ISLNK, follow_symlinks=False)


class _DirEntries(contextlib.AbstractContextManager["_DirEntries"], Iterator[Any]):
    """The iterator that `os.scandir` returns."""

    def __init__(self, entries: Iterable[_DirEntry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _bare(path: Any) -> str:
    return os.fsdecode(path).rstrip("/") or "/"
