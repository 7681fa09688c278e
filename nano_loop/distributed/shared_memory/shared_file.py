"""Files in a private folder that the ranks of one host map, accessible to this user only, whatever the umask.

A path in a folder that others can write to may be a link, or a file that another user placed there. So a file is only
created if none exists, and an opened file must be a regular file of this user that no other user can open.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError, error_message
from nano_loop.storage.trusted_files import open_file

_PRIVATE = 0o600
_ZEROS = memoryview(bytes(1 << 16))  # written at a time
_SAFELY = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def make(path: str, size: int) -> None:
    """Create a file of zeros, complete when others see it, unless it exists; raise an OSError if there is no space."""
    if os.path.lexists(path):
        return
    unseen = f"{path}.{os.getpid()}"
    descriptor = os.open(unseen, _SAFELY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _PRIVATE)
            # Written rather than truncated to size: accessing unallocated memory later raises SIGBUS.
            for start in range(0, size, len(_ZEROS)):
                file.write(_ZEROS[: size - start])
        with suppress(FileExistsError):
            os.link(unseen, path)
    finally:
        os.unlink(unseen)


def map_whole(path: str, size: int) -> mmap.mmap:
    """Map `size` bytes of a regular file that only this user can open; raise an OSError or a `NanoError` for others."""
    descriptor = open_file(path, flags=os.O_RDWR, private=True)
    try:
        return mmap.mmap(descriptor, size)
    except ValueError as error:  # the file is shorter
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)


def map_by_name(path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes of a file that the first rank creates; raise a `NanoError` if the file system is full."""
    try:
        make(str(path), size)
        return map_whole(str(path), size)
    except (OSError, NanoError) as error:
        got = f"{size / 2**20:.0f} MiB of shared memory in {path.parent} could not be allocated ({error})"
        hint = "Free some of it, or give the container more, for example docker run --shm-size=1g"
        message = error_message(got, "the ranks of one host exchange values there", hint)
        raise NanoError(message) from error


def map_together(ranks: Ranks, path: Path, size: int) -> mmap.mmap:
    """Map a file that rank 0 creates, so that none is left, and deletes once all ranks have mapped it. Collective."""
    try:
        created = map_by_name(path, size) if ranks.rank == 0 else None
        ranks.barrier()
        mapped = created or map_by_name(path, size)
        ranks.barrier()
    finally:
        if ranks.rank == 0:
            path.unlink(missing_ok=True)
    return mapped
