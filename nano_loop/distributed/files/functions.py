"""Python's functions for files as ranks other than 0 use them: each looks at the table of private files first."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from stat import S_IMODE, S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.table import Table, missing, os_error
from nano_loop.patching.thread_depth import ThreadDepth

_Function = Callable[..., Any]
_READS = frozenset(("r", "rb", "rt", "br", "tr"))
_BEFORE_OPENER = 6  # arguments of `open` between its mode and its opener, and that one
#: The flags of `os.open` for all that is not reading alone.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Functions of `os` by whether they are about the target of a symbolic link; most have a parameter that says so.
_READING = {"access": True, "getxattr": True, "listxattr": True, "lstat": False, "pathconf": True, "readlink": False}
_READING |= {"stat": True, "statvfs": True}
_CHANGING = {"chflags": True, "chmod": True, "chown": True, "lchflags": False, "lchmod": False, "lchown": False}
_CHANGING |= {"removexattr": True, "setxattr": True, "truncate": True, "utime": True}

#: Entered while this thread does with private files what the audit hook would take for a change of the caller's.
redirected = ThreadDepth()


class Replacement(staticmethod):  # type: ignore[type-arg]
    """A function that a class does not bind, as it does not bind builtin ones, and that is pickled by its name.

    Parameters
    ----------
    function : callable
        What is done.
    original : callable
        What it is done instead of, whose signature and documentation it has.
    module : str
        Where the name of the original leads to it.
    """

    def __init__(self, function: _Function, original: Any, module: str) -> None:
        super().__init__(functools.wraps(original)(functools.partial(function)))
        self.__module__ = module

    def __reduce__(self) -> str:
        """Return the name, by which another process has its own."""
        return str(self.__name__)


def replaced_class(original: type, module: str, make: _Function | None = None, **namespace: Any) -> type:
    """Return a class that stands for another one, in `isinstance` too.

    Parameters
    ----------
    original : type
        The other one.
    module : str
        Where its name leads to it.
    make : callable, optional
        Makes its instances. By default it is a subclass, with `namespace`.
    """

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **options: Any) -> Any:
            return make(*args, **options) if make and cls is made else super().__call__(*args, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is made else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original) if cls is made else type.__subclasscheck__(cls, subclass)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    names = {"__module__": module, "__qualname__": original.__qualname__, "__doc__": original.__doc__, **namespace}
    made = Kind(original.__name__, () if make else (original,), names)
    return made


class DirectoryEntry(os.PathLike[Any]):
    """What `os.DirEntry` is, of something that may be private.

    Parameters
    ----------
    name, path : str or bytes
        As `os.DirEntry` has them.
    key : str
        The path from the root folder on.
    """

    def __init__(self, name: Any, path: Any, key: str) -> None:
        self.name, self.path, self._key = name, path, key

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        """See `os.DirEntry`."""
        return os.lstat(self._key).st_ino

    def is_junction(self) -> bool:
        """See `os.DirEntry`: there are none outside Windows."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """See `os.DirEntry`."""
        return os.stat(self._key, follow_symlinks=follow_symlinks)

    def _is(self, kind: Any, *, follow_symlinks: bool = True) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow_symlinks).st_mode))
        except FileNotFoundError:
            return False

    is_dir = functools.partialmethod(_is, S_ISDIR)
    is_file = functools.partialmethod(_is, S_ISREG)
    is_symlink = functools.partialmethod(_is, S_ISLNK, follow_symlinks=False)


class DirectoryEntries(AbstractContextManager["DirectoryEntries"], Iterator[Any]):
    """The iterator that `os.scandir` returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more entries."""
        self._entries = iter(())


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Let errors name the path that the loop has given, not that of the private file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


class Functions:
    """The functions of one table: each method does what Python's of its name does.

    Parameters
    ----------
    table : Table
        The rank's private files.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def of_os(self) -> dict[str, _Function]:
        """Return the functions by their names in `os`, as many of them as this system has."""
        table, own = self._table, (self._chdir, self._link, self._listdir, self._mkdir, self._open, self._rename)
        return {
            **{name: self._reading(name, follow) for name, follow in _READING.items() if hasattr(real, name)},
            **{name: self._changing(name, follow) for name, follow in _CHANGING.items() if hasattr(real, name)},
            **{name: self._making(name) for name in ("mkfifo", "mknod") if hasattr(real, name)},
            **{method.__name__[1:]: method for method in (*own, self._scandir, self._symlink)},
            "getcwd": table.working_folder,
            "getcwdb": lambda: os.fsencode(table.working_folder()),
            "replace": self._rename,
            **dict.fromkeys(("remove", "unlink"), functools.partial(self._remove, False)),
            "rmdir": functools.partial(self._remove, True),
        }

    # --- reading ---

    def _reading(self, name: str, follows: bool) -> _Function:
        original, table = getattr(real, name), self._table

        def function(path: Any, *args: Any, **options: Any) -> Any:
            if table.is_empty or isinstance(path, int):
                return original(path, *args, **options)
            try:
                place = table.reading(
                    self._at(path, options.pop("dir_fd", None)), follows and options.get("follow_symlinks", True)
                )
            except OSError:
                if name == "access":  # which raises none
                    return False
                raise
            with naming(path):
                return original(place, *args, **options)

        return function

    def _listdir(self, path: Any = None) -> Any:
        names, _ = self._listed(path)
        if names is None:
            return real.listdir(path)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = None) -> Any:
        names, key = self._listed(path)
        if names is None:
            return real.scandir(path)
        folder: Any = "." if path is None else "" if isinstance(path, int) else os.fspath(path)
        kept: list[Any] = [os.fsencode(name) for name in names] if isinstance(folder, bytes) else [*names]
        joined = zip(kept, names, strict=True)
        return DirectoryEntries(
            DirectoryEntry(name, os.path.join(folder, name), os.path.join(key, below)) for name, below in joined
        )

    def _listed(self, path: Any) -> tuple[list[str] | None, str]:
        """Return the names in a folder, and its path; none where Python's function gives them."""
        table = self._table
        if table.is_empty:
            return None, ""
        folder = self._folder_of(path) if isinstance(path, int) else os.fsdecode(path or ".")
        key = table.key(folder)
        names, place = table.names(key), table.place(key)
        if place is None:
            raise missing(path)
        if names is None and (place != key or os.path.join(table.working_folder(), folder) not in (key, f"{key}/.")):
            with naming(path):
                names = real.listdir(place)  # a link that only this rank sees may be on the way
        return names, key

    def _chdir(self, path: Any) -> None:
        with naming(path):
            real.chdir(path if isinstance(path, int) else self._table.reading(os.fspath(path)))

    def _at(self, path: Any, descriptor: int | None) -> Any:
        """Return a path that is meant from an open folder on as one that needs no folder."""
        path = os.fspath(path)
        if descriptor is None or os.path.isabs(path):
            return path
        folder = self._folder_of(descriptor)
        return os.path.join(os.fsencode(folder) if isinstance(path, bytes) else folder, path)

    def _folder_of(self, descriptor: int) -> str:
        """Return the path that the rank knows an open folder by."""
        if hasattr(fcntl, "F_GETPATH"):  # macOS
            place = os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
        else:
            place = os.fsdecode(real.readlink(f"/proc/self/fd/{descriptor}"))
        return self._table.virtual(place)

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
            if isinstance(file, int) or not table.root or (mode in _READS and table.is_empty):
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
        """Return what is `io.FileIO`, of which every unbuffered file is an instance."""

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
