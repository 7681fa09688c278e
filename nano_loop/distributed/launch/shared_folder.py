"""The private folder of a run, whose files all ranks on one host can map."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from nano_loop.distributed.comm.system_limits import SHARED_MEMORY
from nano_loop.distributed.files.folder import discard_workers_files, workers_files
from nano_loop.errors import NanoError, error_message
from nano_loop.storage.trusted_files import make_folder, open_folder, trusted_parent

_PREFIX = "nano_loop-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder, in memory if possible, and delete it and those left by killed processes on exit."""
    parent = trusted_parent((SHARED_MEMORY, Path(tempfile.gettempdir())))
    _delete_abandoned_at_exit(parent)
    delete_abandoned(parent, _PREFIX)
    folder = make_folder(f"{_PREFIX}{os.getpid()}-", [parent])
    try:
        with held(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        delete_abandoned(parent, _PREFIX)


@functools.cache
def folder_of_process(process: int) -> Path:
    """Return the private folder that this process has until it ends: if it is killed, others delete its files."""
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        stack.enter_context(workers_files(folder))
        ending = stack.pop_all()

    @atexit.register
    def end() -> None:
        if os.getpid() == process:  # not in a process that it has forked
            ending.close()

    return folder


@functools.cache
def _delete_abandoned_at_exit(parent: Path) -> None:
    atexit.register(delete_abandoned, parent, _PREFIX)


def refuse_foreign_folder(folder: Path) -> None:
    """Raise a NanoError unless `folder` is a private folder of this user that nobody else can replace."""
    try:
        os.close(open_folder(folder, private=True))
    except OSError as error:
        got = f"the folder of the run, {folder}, cannot be found ({error.strerror})"
        hint = "Start all ranks of a host in one container, or with one shared-memory file system"
        raise NanoError(error_message(got, "the ranks of one host meet there", hint)) from error


def shared_memory_device() -> int:
    """Return the device number of this host's shared-memory file system, which differs between containers."""
    return SHARED_MEMORY.stat().st_dev if SHARED_MEMORY.exists() else 0


# --- folders of processes that were killed ---
# Other processes of the same run or the next one delete them. A process holds a lock on its folder, which the system
# releases when it ends. The process id in the folder's name is not sufficient, because containers that share memory
# have separate process ids.

_locks: set[int] = set()  # descriptors of this process


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder during the body; yield False if another process has it or another user owns it."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            _locks.add(descriptor)
            stack.callback(_close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            is_held = os.path.samestat(status, folder.lstat()) and status.st_uid == os.geteuid()
        except OSError:  # deleted or locked, or its file system has no locks
            is_held = False
        yield is_held


def delete_abandoned(parent: Path, prefix: str) -> None:
    """Delete folders in `parent`, named by `prefix` and a process id, that killed processes of this user have left."""
    for folder in parent.glob(f"{prefix}[0-9]*-*"):
        process = folder.name[len(prefix) :].partition("-")[0]
        if not (process.isdecimal() and has_ended(int(process))):
            continue
        with held(folder) as is_held:
            if is_held:
                discard_workers_files(folder, prefix)
                shutil.rmtree(folder, ignore_errors=True)


def has_ended(process: int) -> bool:
    """Return whether a process has ended or is a zombie."""
    try:
        return bool(psutil.Process(process).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor in _locks:
            _locks.remove(descriptor)
            os.close(descriptor)


# A process that a rank has forked, such as a loader's worker, may outlive the rank.
os.register_at_fork(after_in_child=lambda: _close(*_locks))
