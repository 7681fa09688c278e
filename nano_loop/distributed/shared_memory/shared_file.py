"""Files in a private folder that the ranks of one host map: of this user alone, whatever the umask, and of no one else.

A name in a folder that others can write to may be a link, or a file that somebody else has put there. So files are
made only where there is none, and what is opened has to be a regular file of this user that no other user can open.
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
_ZEROS = memoryview(bytes(1 << 16))  # that are written at a time
_SAFELY = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def make(path: str, size: int) -> None:
    """Make a file of `size` zeros, which is whole when others see it, unless there is something at `path` already.

    Raises
    ------
    OSError
        If there is no room. Nothing is left then.
    """
    if os.path.lexists(path):
        return
    unseen = f"{path}.{os.getpid()}"
    descriptor = os.open(unseen, _SAFELY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _PRIVATE)
            # Written, not only made long: memory that is not there when it is first used is a SIGBUS.
            for start in range(0, size, len(_ZEROS)):
                file.write(_ZEROS[: size - start])
        with suppress(FileExistsError):
            os.link(unseen, path)
    finally:
        os.unlink(unseen)


def map_whole(path: str, size: int) -> mmap.mmap:
    """Map `size` bytes of a file, which must be this user's alone.

    Raises
    ------
    OSError
        If it cannot be opened, or is shorter.
    NanoError
        If it is not a regular file, belongs to another user, or can be opened by other users.
    """
    descriptor = open_file(path, flags=os.O_RDWR, private=True)
    try:
        return mmap.mmap(descriptor, size)
    except ValueError as error:  # the file is shorter
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)


def map_by_name(path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes of a file that the first rank to come makes at `path`; nothing is exchanged.

    Raises
    ------
    NanoError
        If this rank cannot make or map the file, as when the file system is full.
    """
    try:
        make(str(path), size)
        return map_whole(str(path), size)
    except (OSError, NanoError) as error:
        got = f"{size / 2**20:.0f} MiB of shared memory in {path.parent} could not be allocated ({error})"
        hint = "Free some of it; give a container more, for example docker run --shm-size=1g"
        message = error_message(got, "the ranks of one host exchange their values there", hint)
        raise NanoError(message) from error


def map_together(ranks: Ranks, path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes of a file on every rank, or raise on every rank. Collective.

    The file is gone as soon as all have mapped it, so whatever happens later leaves nothing behind.

    Parameters
    ----------
    ranks : Ranks
        All of one host.
    path : pathlib.Path
        Of the file.
    size : int
        How many bytes.

    Raises
    ------
    NanoError
        If one of the ranks cannot make or map it.
    """
    reason, mapped = "", None
    try:
        try:
            mapped = map_by_name(path, size)
        except NanoError as error:
            reason = str(error)
        reasons = [*filter(None, ranks.gather(reason))]
    finally:
        if ranks.rank == 0:
            path.unlink(missing_ok=True)
    if reasons or mapped is None:
        raise NanoError(reasons[0])
    return mapped
