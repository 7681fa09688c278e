"""The private folder of a run, whose files all ranks of one host can map."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nano_loop.distributed.comm.system_limits import SHARED_MEMORY
from nano_loop.distributed.files.folder import workers_files
from nano_loop.distributed.launch.abandoned import delete_abandoned, held
from nano_loop.errors import NanoError, error_message
from nano_loop.storage.trusted_files import make_folder, open_folder, trusted_parent

_PREFIX = "nano_loop-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder, in memory where this system has a file system there, and delete it on leaving.

    What processes have left there that were killed is deleted too: before, on leaving, and when this process ends.
    """
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
    """Return the private folder that a process, this one, has until it ends, with one for files on disk.

    So what it leaves where it is killed is deleted by others, also after the run.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        stack.enter_context(workers_files(folder))
        ending = stack.pop_all()

    @atexit.register
    def end() -> None:
        if os.getpid() == process:  # and not a process that it has forked
            ending.close()

    return folder


@functools.cache
def _delete_abandoned_at_exit(parent: Path) -> None:
    atexit.register(delete_abandoned, parent, _PREFIX)


def refuse_foreign_folder(folder: Path) -> None:
    """Raise a NanoError unless `folder` is a private folder of this user, which nobody else can replace."""
    try:
        os.close(open_folder(folder, private=True))
    except OSError as error:
        got = f"the folder of the run, {folder}, cannot be found ({error.strerror})"
        hint = "Start all ranks of a host in one container, or with one shared-memory file system"
        raise NanoError(error_message(got, "ranks of one host meet there", hint)) from error


def shared_memory_device() -> int:
    """Return the number of this host's shared-memory file system, which containers have each their own of."""
    return SHARED_MEMORY.stat().st_dev if SHARED_MEMORY.exists() else 0
