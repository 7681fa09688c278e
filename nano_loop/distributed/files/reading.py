"""Python's functions that read files and folders, as ranks other than 0 use them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Any

from nano_loop.distributed.files.directory_entries import DirectoryEntries, DirectoryEntry
from nano_loop.distributed.files.originals import missing, real
from nano_loop.distributed.files.table import Table

_Function = Callable[..., Any]
#: Functions of `os` by whether they are about the target of a symbolic link; most have a parameter that says so.
READING = {"access": True, "getxattr": True, "listxattr": True, "lstat": False, "pathconf": True, "readlink": False}
READING |= {"stat": True, "statvfs": True}


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Let errors name the path that the loop has given, not that of the private file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


class ReadingFunctions:
    """The functions of one table that read: each does what Python's of its name does.

    Parameters
    ----------
    table : Table
        The rank's private files.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def reading_functions(self) -> dict[str, _Function]:
        """Return them by their names in `os`, as many of them as this system has."""
        table, own = self._table, (self._chdir, self._listdir, self._scandir)
        return {
            **{name: self._reading(name, follow) for name, follow in READING.items() if hasattr(real, name)},
            **{method.__name__[1:]: method for method in own},
            "getcwd": table.working_folder,
            "getcwdb": lambda: os.fsencode(table.working_folder()),
        }

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
