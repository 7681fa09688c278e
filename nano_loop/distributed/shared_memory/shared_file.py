"""Files in a private folder that the ranks of one host map: of this user alone, whatever the umask, and of no one else.

A name in a folder that others can write to may be a link, or a file that somebody else has put there. So files are
made only where there is none, and what is opened has to be a regular file of this user that no other user can open.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError, error_message
from nano_loop.storage.trusted_files import open_file

_PRIVATE = 0o600
_SHORT = 120  # bytes of a link that lies in its inode
_ZEROS = memoryview(bytes(1 << 16))  # that are written at a time
_SAFELY = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def make(path: str, size: int) -> None:
    """Make a file of `size` zeros.

    Raises
    ------
    OSError
        If there is something at `path` already, or no room. Nothing is left then.
    """
    descriptor = os.open(path, _SAFELY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _PRIVATE)
            # Written, not only made long: memory that is not there when it is first used is a SIGBUS.
            for start in range(0, size, len(_ZEROS)):
                file.write(_ZEROS[: size - start])
    except BaseException:
        os.unlink(path)
        raise


def make_at_once(path: str, size: int) -> bool:
    """Make a file of `size` zeros that is whole when others see it; return False if there is one already."""
    if os.path.lexists(path):
        return False
    unseen = f"{path}.{os.getpid()}"
    make(unseen, size)
    try:
        os.link(unseen, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(unseen)
    return True


def open_private(path: str) -> int:
    """Return a descriptor of a file, which must be this user's alone.

    Raises
    ------
    OSError
        If it cannot be opened, as when it is a link.
    NanoError
        If it is no regular file, belongs to another user, or can be opened by other users.
    """
    return open_file(path, flags=os.O_RDWR, private=True)


def map_whole(path: str, size: int) -> mmap.mmap:
    """Map `size` bytes of a file that `make` or `make_at_once` has made; see `open_private`."""
    descriptor = open_private(path)
    try:
        return mmap.mmap(descriptor, size)
    except ValueError as error:  # the file is shorter
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)


def map_together(ranks: Ranks, path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes of a file that rank 0 makes. Collective.

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
        On every rank, if one of them cannot make or map its file, as when the file system is full.
    """
    try:
        with _agreed(ranks, path, size):
            if ranks.rank == 0:
                make(str(path), size)
        with _agreed(ranks, path, size):
            mapped = map_whole(str(path), size)
    finally:
        if ranks.rank == 0:
            with suppress(FileNotFoundError):
                os.unlink(path)
    return mapped


def map_by_name(path: Path, rank: int, size: int) -> mmap.mmap:
    """Map `size` bytes of a file that the first rank to come makes at `path`; nothing is exchanged.

    Raises
    ------
    NanoError
        If this rank cannot make or map the file. In the others, `refuse_failed` raises then. The first failure is
        named on all ranks.
    """
    try:
        make_at_once(str(path), size)
        return map_whole(str(path), size)
    except (OSError, NanoError) as error:
        refuse_failed(path)  # a rank that has failed takes the file away, so this one cannot map it either
        # A short link takes no room in a file system in memory. Without one, the others see this rank fail.
        with suppress(OSError):
            _failed(path).symlink_to(f"{size} rank {rank}: {error}"[:_SHORT])
        raise NanoError(_no_room(path, size, f"rank {rank}: {error}")) from error


def refuse_failed(path: Path) -> None:
    """Raise a NanoError if a rank could not map the file at `path`."""
    with suppress(OSError):
        size, reason = os.readlink(_failed(path)).split(" ", 1)
        raise NanoError(_no_room(path, int(size), reason))


def _failed(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


@contextmanager
def _agreed(ranks: Ranks, path: Path, size: int) -> Iterator[None]:
    """Raise a NanoError on every rank if the body fails on one of them. Collective."""
    reason = ""
    try:
        yield
    except (OSError, NanoError) as error:
        reason = _no_room(path, size, error)
    reasons = [rank_reason for rank_reason in ranks.gather(reason) if rank_reason]
    if reasons:
        raise NanoError(reasons[0])


def _no_room(path: Path, size: int, reason: object) -> str:
    got = f"{size / 2**20:.0f} MiB of shared memory in {path.parent} could not be allocated ({reason})"
    hint = "Free some of it; give a container more, for example docker run --shm-size=1g"
    return error_message(got, "the ranks of one host exchange their values there", hint)
