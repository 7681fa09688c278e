"""How a worker makes, removes and renames files and folders in its own view."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Any

from nano_loop.distributed.files.changes import PRIVATE
from nano_loop.distributed.files.copies import naming, own_folder, own_tree, replacing
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.overlay import Overlay, identity, lower, missing

_remove_tree = shutil.rmtree


@contextlib.contextmanager
def making(overlay: Overlay, path: Any) -> Iterator[Any]:
    """Give the place of something that is made in the body, and that must not be there yet."""
    key = overlay.key(os.fsdecode(path).rstrip("/"), follow=False)
    if overlay.is_shared(key):
        yield path
        return
    with overlay.lock, naming(path):
        seen = overlay.seen(key)
        if seen is not None and not overlay.is_rank_0s(key, seen):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with replacing(overlay, key) as place:
            yield place
        overlay.forget_folders()


def remove(overlay: Overlay, path: Any) -> None:
    """Do what `os.remove` does."""
    key = key_to_remove(overlay, path)
    if key is None:
        return
    if overlay.is_shared(key):
        real.unlink(path)
        return
    with overlay.lock:
        seen = overlay.seen(key)
        assert seen is not None
        if stat.S_ISDIR(seen.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        _remove(overlay, key)


def rmdir(overlay: Overlay, path: Any) -> None:
    """Do what `os.rmdir` does."""
    key = key_to_remove(overlay, path)
    if key is None:
        return
    if overlay.is_shared(key):
        real.rmdir(path)
        return
    with overlay.lock:
        seen = overlay.seen(key)
        assert seen is not None
        _must_be_empty(overlay, key, path, seen)
        remove_tree(overlay, key)


def remove_tree(overlay: Overlay, key: str) -> None:
    """Remove a folder, as the worker sees it, with all that is in it."""
    with overlay.lock:
        _remove(overlay, key)
        for each, what in overlay.changes.under(key):
            if not isinstance(what, list):
                overlay.changes.set(each, None)
        _hide_tree(overlay, key)


def rename(overlay: Overlay, source: Any, target: Any) -> None:
    """Do what `os.replace` does."""
    new = overlay.key(os.fsdecode(target).rstrip("/"), follow=False)
    old = key_to_remove(overlay, source, tolerant=overlay.seen(new) is not None)  # rank 0 may have renamed it
    if old is None:
        return
    if overlay.is_shared(old) and overlay.is_shared(new):
        real.rename(source, target)
        return
    with overlay.lock:
        seen, replaced = overlay.seen(old), overlay.seen(new)
        assert seen is not None
        for number, inner, outer in ((errno.EINVAL, new, old), (errno.ENOTEMPTY, old, new)):
            if inner.startswith(f"{outer}/"):
                raise OSError(number, os.strerror(number), source, None, target)
        if replaced is None or not os.path.samestat(seen, replaced):  # nothing happens to two names of one file
            if replaced is not None:
                _must_be_replaceable(overlay, new, target, seen, replaced)
            with naming(source):
                _move(overlay, old, new)


def _move(overlay: Overlay, old: str, new: str) -> None:
    origin = old if overlay.is_shared(old) else own_tree(overlay, old)
    if overlay.is_shared(new):
        real.rename(origin, new)
    else:
        with replacing(overlay, new) as place:
            real.rename(origin, place)
        _note_tree(overlay, new)
    if not overlay.is_shared(old):
        remove_tree(overlay, old)
    overlay.forget_folders()


def _note_tree(overlay: Overlay, key: str) -> None:
    for folder, folders, files in _walk(overlay.root + key):
        for name in (*folders, *files):
            overlay.changes.set(overlay.virtual(os.path.join(folder, name)), PRIVATE)


def _remove(overlay: Overlay, key: str) -> None:
    place = overlay.root + key
    found = lower(place)
    if found is not None and stat.S_ISDIR(found.st_mode):
        _remove_tree(place)
    elif found is not None:
        real.unlink(place)
    _hide(overlay, key)
    overlay.forget_folders()


def _hide(overlay: Overlay, key: str) -> None:
    """Let the worker see nothing where the caller may have something."""
    found = lower(key)
    with contextlib.suppress(FileNotFoundError):  # rank 0 has removed the folder too
        if found is not None:
            own_folder(overlay, os.path.dirname(key))
    overlay.changes.set(key, None if found is None else identity(found))


def _hide_tree(overlay: Overlay, key: str) -> None:
    for folder, folders, files in _walk(key):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found = lower(path)
            overlay.changes.set(path, None if found is None else identity(found))


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Do what `os.walk` does, in the caller's files."""
    with contextlib.suppress(OSError):  # rank 0 may be removing it
        with real.scandir(folder) as entries:
            found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        folders = [name for name, is_folder in found.items() if is_folder]
        yield folder, folders, [name for name in found if name not in folders]
        for name in folders:
            yield from _walk(os.path.join(folder, name))


def key_to_remove(overlay: Overlay, path: Any, tolerant: bool = True) -> str | None:
    """Return the resolved path of what is to be removed; None where rank 0 has removed it before this worker.

    Raises
    ------
    FileNotFoundError
        If there is nothing, and rank 0 has not removed it, or not `tolerant`.
    """
    name = os.fsdecode(path).rstrip("/") or "/"
    with contextlib.suppress(FileNotFoundError):
        key = overlay.key(name, follow=False)
        if overlay.seen(key) is not None:
            return key
    if not tolerant or not overlay.has_rank_0_removed(name):
        raise missing(path)
    return None


def _must_be_replaceable(overlay: Overlay, key: str, path: Any, seen: os.stat_result, replaced: os.stat_result) -> None:
    if stat.S_ISDIR(seen.st_mode):
        _must_be_empty(overlay, key, path, replaced)
        remove_tree(overlay, key)
    elif stat.S_ISDIR(replaced.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _must_be_empty(overlay: Overlay, key: str, path: Any, seen: os.stat_result) -> None:
    """Check that a folder is one, and holds nothing that rank 0 has not put there in this run."""
    if not stat.S_ISDIR(seen.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    for name in overlay.names(key):
        child = os.path.join(key, name)
        if not overlay.is_rank_0s(child, overlay.seen(child)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
