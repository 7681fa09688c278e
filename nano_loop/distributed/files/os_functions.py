"""The functions of `os` that a worker uses instead of Python's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nano_loop.distributed.files import edits
from nano_loop.distributed.files.copies import naming, open_file, own
from nano_loop.distributed.files.listing import folder_of, listed, scanned
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.overlay import Overlay, missing

_Function = Callable[..., Any]
# By whether they are about a symbolic link itself; most have a parameter that says so.
_READING = {"getxattr": True, "listxattr": True, "lstat": False, "pathconf": True, "readlink": False}
_READING |= {"stat": True, "statvfs": True}
_CHANGING = {"chflags": True, "chmod": True, "chown": True, "lchflags": False, "lchmod": False, "lchown": False}
_CHANGING |= {"removexattr": True, "setxattr": True, "truncate": True, "utime": True}
_MAKING = ("mkdir", "mkfifo", "mknod")
_REMOVING = {"remove": edits.remove, "unlink": edits.remove, "rmdir": edits.rmdir}


def os_functions(overlay: Overlay) -> dict[str, _Function]:
    """Return the functions by their names in `os`, as many of them as this system has."""
    made: dict[str, _Function] = {
        **{name: _reading(overlay, name, follow) for name, follow in _READING.items() if hasattr(real, name)},
        **{name: _changing(overlay, name, follow) for name, follow in _CHANGING.items() if hasattr(real, name)},
        **{name: _making(overlay, name) for name in _MAKING if hasattr(real, name)},
        **{name: _removing(overlay, name, remove) for name, remove in _REMOVING.items()},
        **{name: _renaming(overlay, name) for name in ("rename", "replace")},
        "access": _access(overlay),
        **_linking(overlay),
        **_listing(overlay),
        **_working_folder(overlay),
        "open": _opening(overlay),
    }
    return made


def path_at(overlay: Overlay, path: Any, descriptor: int | None) -> Any:
    """Return a path that is meant from an open folder on as one that needs no folder."""
    path = os.fspath(path)
    if descriptor is None or os.path.isabs(path):
        return path
    folder = folder_of(overlay, descriptor)
    if folder is None:
        raise OSError(f"the folder of descriptor {descriptor} has no path")
    return os.path.join(os.fsencode(folder) if isinstance(path, bytes) else folder, path)


def _reading(overlay: Overlay, name: str, follows: bool) -> _Function:
    original = getattr(real, name)
    changes = overlay.changes

    def function(path: Any, *args: Any, **options: Any) -> Any:
        if not changes.active or isinstance(path, int):
            return original(path, *args, **options)
        given = path_at(overlay, path, options.get("dir_fd"))
        place = overlay.reading(given, follows and options.get("follow_symlinks", True))
        if place is given:
            return original(path, *args, **options)
        options.pop("dir_fd", None)
        with naming(path):
            return original(place, *args, **options)

    return function


def _access(overlay: Overlay) -> _Function:
    access = _reading(overlay, "access", follows=True)

    def function(path: Any, mode: int, **options: Any) -> bool:
        try:
            return bool(access(path, mode, **options))
        except OSError:  # Python's raises none
            return False

    return function


def _changing(overlay: Overlay, name: str, follows: bool) -> _Function:
    original = getattr(real, name)

    def function(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, int):
            return original(path, *args, **options)
        given = path_at(overlay, path, options.pop("dir_fd", None))
        key = overlay.key(os.fsdecode(given), follows and options.get("follow_symlinks", True))
        if overlay.is_shared(key):
            return original(given, *args, **options)
        overlay.refresh()
        with overlay.lock:
            place = own(overlay, key)
        with naming(path):
            return original(place, *args, **options)

    return function


def _making(overlay: Overlay, name: str) -> _Function:
    original = getattr(real, name)

    def function(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
        overlay.refresh()
        with edits.making(overlay, path_at(overlay, path, dir_fd)) as place:
            return original(place, *args, **options)

    return function


def _linking(overlay: Overlay) -> dict[str, _Function]:
    def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        overlay.refresh()
        with edits.making(overlay, path_at(overlay, dst, dir_fd)) as place:
            real.symlink(src, place)

    def link(
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        overlay.refresh()
        key = overlay.key(os.fsdecode(path_at(overlay, src, src_dir_fd)), follow=False)
        if overlay.seen(key) is None:
            raise missing(src)
        with overlay.lock, edits.making(overlay, path_at(overlay, dst, dst_dir_fd)) as place:
            source = key if overlay.is_shared(key) else own(overlay, key)
            real.link(source, place, follow_symlinks=follow_symlinks)

    return {"symlink": symlink, "link": link} if hasattr(real, "link") else {"symlink": symlink}


def _removing(overlay: Overlay, name: str, remove: _Function) -> _Function:
    def function(path: Any, *, dir_fd: int | None = None) -> None:
        overlay.refresh()
        remove(overlay, path_at(overlay, path, dir_fd))

    return function


def _renaming(overlay: Overlay, name: str) -> _Function:
    def function(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        overlay.refresh()
        edits.rename(overlay, path_at(overlay, src, src_dir_fd), path_at(overlay, dst, dst_dir_fd))

    return function


def _listing(overlay: Overlay) -> dict[str, _Function]:
    changes = overlay.changes

    def listdir(path: Any = None) -> Any:
        if not changes.active:
            return real.listdir(path)
        found = listed(overlay, "." if path is None else path)
        return real.listdir(path) if found is None else found

    def scandir(path: Any = None) -> Any:
        if not changes.active:
            return real.scandir(path)
        found = scanned(overlay, "." if path is None else path)
        return real.scandir(path) if found is None else found

    return {"listdir": listdir, "scandir": scandir}


def _working_folder(overlay: Overlay) -> dict[str, _Function]:
    def chdir(path: Any) -> None:
        real.chdir(path if isinstance(path, int) else overlay.reading(os.fspath(path)))
        overlay.cwd = overlay.virtual(real.getcwd())

    def fchdir(fd: Any) -> None:
        real.fchdir(fd)
        overlay.cwd = overlay.virtual(real.getcwd())

    def getcwd() -> str:
        return overlay.virtual(real.getcwd())

    def getcwdb() -> bytes:
        return os.fsencode(getcwd())

    return {"chdir": chdir, "fchdir": fchdir, "getcwd": getcwd, "getcwdb": getcwdb}


def _opening(overlay: Overlay) -> _Function:
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        overlay.refresh()
        return open_file(overlay, path_at(overlay, path, dir_fd), flags, mode)

    return open
