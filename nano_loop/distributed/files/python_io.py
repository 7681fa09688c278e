"""The functions of Python, besides those of `os`, through which a worker opens and removes files."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from typing import Any

from nano_loop.distributed.files.copies import open_file
from nano_loop.distributed.files.edits import key_to_remove, remove_tree
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.distributed.files.unseen import redirected

_READS = frozenset(("r", "rb", "rt", "br", "tr"))
_remove_tree = shutil.rmtree
_OF_MULTIPROCESSING = "pymp-"  # what the names of its folders begin with
_sanitize = "_sanitize_params"  # where tempfile decides on the folder; it has no public place


def opening(overlay: Overlay) -> Callable[..., Any]:
    """Return what a worker uses as `open`."""
    changes, opener_of_copies = overlay.changes, _opener(overlay)

    def is_untouched(file: Any) -> bool:
        try:
            path = os.fspath(file)
            return overlay.reading(path) is path
        except OSError:  # which opening it will raise
            return False

    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if isinstance(file, int) or (mode in _READS and (not changes.active or is_untouched(file))):
            return real.open_file(file, mode, buffering, encoding, errors, newline, closefd, opener)
        with redirected:
            opener = opener or opener_of_copies
            return real.open_file(file, mode, buffering, encoding, errors, newline, closefd, opener)

    return open


def file_io(overlay: Overlay) -> type:
    """Return what a worker uses as `io.FileIO`, of which every unbuffered file is an instance."""
    opener_of_copies = _opener(overlay)

    class Kind(type(real.FileIO)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real.FileIO) if cls is FileIO else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real.FileIO) if cls is FileIO else type.__subclasscheck__(cls, subclass)

    class FileIO(real.FileIO, metaclass=Kind):  # type: ignore[misc]
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            if opener is None and not isinstance(file, int):
                opener = opener_of_copies
            with redirected:
                super().__init__(file, mode, closefd, opener)

    FileIO.__module__, FileIO.__qualname__ = "io", "FileIO"
    return FileIO


def _opener(overlay: Overlay) -> Callable[[Any, int], int]:
    def open_copy(path: Any, flags: int) -> int:
        overlay.refresh()
        return open_file(overlay, os.fspath(path), flags, 0o666)

    return open_copy


def removing_tree(overlay: Overlay) -> Callable[..., Any]:
    """Return what a worker uses as `shutil.rmtree`, which rank 0 may be doing to the same folder."""

    def rmtree(path: Any, *args: Any, **options: Any) -> None:
        overlay.refresh()
        if options.get("dir_fd") is not None or isinstance(path, int):
            _remove_tree(path, *args, **options)
            return
        try:
            key = key_to_remove(overlay, path)
        except OSError:
            _remove_tree(path, *args, **options)  # which calls the function of the caller for errors
            return
        if key is None:
            return
        seen = overlay.seen(key)
        if overlay.is_shared(key) or seen is None or not stat.S_ISDIR(seen.st_mode):
            _remove_tree(path, *args, **options)
        else:
            remove_tree(overlay, key)

    rmtree.avoids_symlink_attacks = True  # type: ignore[attr-defined]
    return rmtree


def keep_temporary_files_in(folder: str, sockets: str) -> None:
    """Let `tempfile` make files in a folder where the caller names none, for as long as the process lives.

    `tempfile.gettempdir()` stays that of the caller, which may have put something there for the loop.

    Parameters
    ----------
    folder : str
        For temporary files.
    sockets : str
        For the folder in which multiprocessing makes its sockets, whose paths may have 107 characters.
    """
    original = getattr(tempfile, _sanitize, None)
    if original is None:
        return

    def sanitized(prefix: Any, suffix: Any, dir: Any) -> Any:
        prefix, suffix, found, kind = original(prefix, suffix, dir)
        if dir is None:
            found = sockets if prefix == _OF_MULTIPROCESSING else os.fsencode(folder) if kind is bytes else folder
        return prefix, suffix, found, kind

    setattr(tempfile, _sanitize, sanitized)
