"""Python's functions for files as ranks other than 0 use them: each looks at the table of private files first."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
from collections.abc import Callable, Iterator
from stat import S_IMODE, S_ISDIR, S_ISREG
from typing import Any

from nano_loop.distributed.files.originals import missing, os_error, real
from nano_loop.distributed.files.reading import ReadingFunctions, naming
from nano_loop.distributed.files.replacements import replaced_class
from nano_loop.patching.thread_depth import ThreadDepth

_Function = Callable[..., Any]
_READ_ONLY = frozenset(("r", "rb", "rt", "br", "tr"))
_BEFORE_OPENER = 6  # arguments of `open` between its mode and its opener, and that one
#: The flags of `os.open` for all that is not reading alone.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# As `READING`.
_CHANGING = {"chflags": True, "chmod": True, "chown": True, "lchflags": False, "lchmod": False, "lchown": False}
_CHANGING |= {"removexattr": True, "setxattr": True, "truncate": True, "utime": True}

#: Entered while this thread does with private files what the audit hook would take for a change of the caller's.
redirected = ThreadDepth()


class Functions(ReadingFunctions):
    """All functions of one table: each method does what Python's of its name does."""

    def of_os(self) -> dict[str, _Function]:
        """Return the functions by their names in `os`, as many of them as this system has."""
        own = (self._link, self._mkdir, self._open, self._rename, self._symlink)
        return {
            **self.reading_functions(),
            **{name: self._changing(name, follow) for name, follow in _CHANGING.items() if hasattr(real, name)},
            **{name: self._making(name) for name in ("mkfifo", "mknod") if hasattr(real, name)},
            **{method.__name__[1:]: method for method in own},
            "replace": self._rename,
            **dict.fromkeys(("remove", "unlink"), functools.partial(self._remove, False)),
            "rmdir": functools.partial(self._remove, True),
        }

    # --- opening ---

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        path = self._at(path, dir_fd)
        with naming(path), redirected:
            return self._opened(path, flags, mode)

    def _opened(self, path: Any, flags: int, mode: int) -> int:
        table = self._table
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        if not flags & WRITING:
            return _descriptor(table.reading(path, not flags & os.O_NOFOLLOW), flags, mode)
        key = table.key(path, not (exclusive or flags & os.O_NOFOLLOW))
        if table.is_shared(key):
            return _descriptor(path, flags, mode)
        if exclusive:
            self._must_be_new(key, path)
        status = None if exclusive else table.seen(key)
        if status is None:
            if not flags & os.O_CREAT:
                raise missing(path)
            return _descriptor(table.new(key), flags, mode)
        if not S_ISREG(status.st_mode):  # a device, a pipe, or the folder of a file without a name; another raises
            place = table.place(key)
            return (
                table.outside.submit(_descriptor, place, flags, mode).result()
                if table.outside
                else _descriptor(place, flags, mode)
            )
        if flags & os.O_TRUNC:
            return _descriptor(table.new(key), flags | os.O_CREAT, S_IMODE(status.st_mode))
        return _descriptor(table.own(key), flags, mode)

    def of_io(self) -> _Function:
        """Return what does what `open` does."""
        table = self._table

        def open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not table.root or (mode in _READ_ONLY and table.is_empty):
                return real.open_file(file, mode, *args, **options)
            if len(args) < _BEFORE_OPENER and options.get("opener") is None:
                options["opener"] = self._opener
            with redirected:
                return real.open_file(file, mode, *args, **options)

        return open

    def _opener(self, path: Any, flags: int) -> int:
        with naming(path):
            return self._opened(os.fspath(path), flags, 0o666)

    def file_io(self) -> type:
        """Return the replacement of `io.FileIO`, the class of every unbuffered file."""

        def init(file_io: Any, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            if opener is None and self._table.root and not isinstance(file, int):
                opener = self._opener
            with redirected:
                real.FileIO.__init__(file_io, file, mode, closefd, opener)

        return replaced_class(io.FileIO, "io", __init__=init)

    # --- making, changing, removing and renaming ---

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        table, path = self._table, self._at(path, dir_fd)
        key = table.key(_bare(path), follow=False)
        if table.is_shared(key):
            real.mkdir(path, mode)
            return
        self._must_be_new(key, path)
        with naming(path):
            table.make_folder(key, mode)

    def _must_be_new(self, key: str, path: Any) -> None:
        if self._table.seen(key) is not None and not self._table.is_rank_0s(key):
            raise os_error(errno.EEXIST, path)

    @contextlib.contextmanager
    def _new(self, path: Any, descriptor: int | None) -> Iterator[Any]:
        """Give the place of something that is made in the body, and that must not be there yet."""
        table, path = self._table, self._at(path, descriptor)
        key = table.key(_bare(path), follow=False)
        if table.is_shared(key):
            yield path
            return
        self._must_be_new(key, path)
        with naming(path), redirected:
            yield table.new(key)

    def _making(self, name: str) -> _Function:
        original = getattr(real, name)

        def function(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            with self._new(path, dir_fd) as place:
                return original(place, *args, **options)

        return function

    def _symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        with self._new(dst, dir_fd) as place:
            real.symlink(src, place)
            self._table.forget_folders()

    def _link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        key = self._table.key(self._at(src, src_dir_fd), follow=False)
        if self._table.seen(key) is None:
            raise missing(src)
        with self._new(dst, dst_dir_fd) as place:
            real.link(self._table.own(key), place, follow_symlinks=follow_symlinks)

    def _changing(self, name: str, follows: bool) -> _Function:
        original, table = getattr(real, name), self._table

        def function(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, int) or not table.root:
                return original(path, *args, **options)
            path = self._at(path, options.pop("dir_fd", None))
            key = table.key(path, follows and options.get("follow_symlinks", True))
            if table.is_shared(key):
                return original(path, *args, **options)
            with naming(path), redirected:
                place = table.own(key)
                if place == key and S_ISDIR(real.lstat(place).st_mode) and name != "truncate":
                    return None  # a real folder is rank 0's
                return original(place, *args, **options)

        return function

    def _remove(self, folder: bool, path: Any, *, dir_fd: int | None = None) -> None:
        path = self._at(path, dir_fd)
        table = self._table
        key = self._key_to_remove(path)
        if key is None:
            return
        if table.is_shared(key):
            (real.rmdir if folder else real.unlink)(path)
        elif folder:
            self._must_be_empty(key, path)
            table.remove(key)
        elif S_ISDIR(table.seen(key).st_mode):  # type: ignore[union-attr]
            raise os_error(errno.EISDIR, path)
        else:
            table.remove(key)

    def removing_tree(self) -> _Function:
        """Return what does what `shutil.rmtree` does, also where rank 0 is doing it to the same folder."""
        original = shutil.rmtree

        def rmtree(path: Any, *args: Any, **options: Any) -> None:
            table = self._table
            if not table.root or options.get("dir_fd") is not None or isinstance(path, int):
                original(path, *args, **options)
                return
            try:
                key = self._key_to_remove(path)
            except OSError:
                original(path, *args, **options)  # which calls the function of the caller for errors
                return
            if key is None:
                return
            status = table.seen(key)
            if table.is_shared(key) or status is None or not S_ISDIR(status.st_mode):
                original(path, *args, **options)
            else:
                table.remove(key)

        rmtree.avoids_symlink_attacks = True  # type: ignore[attr-defined]
        return rmtree

    def _key_to_remove(self, path: Any, tolerant: bool = True) -> str | None:
        """Return the resolved path of what is to be removed; None where rank 0 has removed it before this rank.

        Raises
        ------
        FileNotFoundError
            If there is nothing, and rank 0 has not removed it, or not `tolerant`.
        """
        with contextlib.suppress(FileNotFoundError):
            key = self._table.key(_bare(path), follow=False)
            if self._table.is_shared(key) or self._table.seen(key) is not None:
                return key
        if not tolerant or not self._table.has_rank_0_removed(_bare(path)):
            raise missing(path)
        return None

    def _must_be_empty(self, key: str, path: Any) -> None:
        """Check that a folder is one, and holds nothing that rank 0 has not put there in this run."""
        status = self._table.seen(key)
        if status is None or not S_ISDIR(status.st_mode):
            raise os_error(errno.ENOTDIR, path)
        for name in self._listdir(key):
            if not self._table.is_rank_0s(os.path.join(key, name)):
                raise os_error(errno.ENOTEMPTY, path)

    def _rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        table, src, dst = self._table, self._at(src, src_dir_fd), self._at(dst, dst_dir_fd)
        new = table.key(_bare(dst), follow=False)
        old = self._key_to_remove(src, tolerant=table.seen(new) is not None)  # rank 0 may have renamed it
        if old is None:
            return
        if table.is_shared(old) and table.is_shared(new):
            real.rename(src, dst)
            return
        status, replaced = table.seen(old), table.seen(new)
        if status is None:
            raise missing(src)
        for number, inner, outer in ((errno.EINVAL, new, old), (errno.ENOTEMPTY, old, new)):
            if inner.startswith(f"{outer}/"):
                raise os_error(number, src, dst)
        if replaced is None or not os.path.samestat(status, replaced):  # nothing happens to two names of one file
            if replaced is not None and S_ISDIR(status.st_mode):
                self._must_be_empty(new, dst)
                table.remove(new)
            elif replaced is not None and S_ISDIR(replaced.st_mode):
                raise os_error(errno.EISDIR, dst)
            with naming(src), redirected:
                real.rename(table.own_tree(old), table.new(new))
                table.remove(old)


def _descriptor(place: Any, flags: int, mode: int) -> int:
    descriptor: int = real.open(place, flags, mode)
    return descriptor


def _bare(path: Any) -> str:
    return os.fsdecode(path).rstrip("/") or "/"
