"""Two ways in which the ranks of one host come to map the same memory: by asking each other, and by a name alone.

Either file is gone from its folder as soon as all ranks have mapped it, so whatever happens later leaves nothing
behind.
"""

from __future__ import annotations

import mmap
import os
import uuid
from pathlib import Path

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_file import make, make_at_once, map_whole
from nano_loop.errors import NanoError, error_message


def map_together(ranks: Ranks, folder: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Map `size` bytes of a file that rank 0 makes in `folder`. Collective, through the channel of `ranks`.

    Raises
    ------
    NanoError
        On every rank, if one of them cannot make or map the file, as when the file system is full.
    """
    folder = os.fspath(folder)
    path, unmade = _make(folder, size) if ranks.rank == 0 else (None, None)
    try:
        path, unmade = ranks.broadcast((path, unmade))
        mapped, unmapped = _map(path, size)
        failures = [failure for failure in (unmade, *ranks.gather(unmapped)) if failure]
        # from here on all have mapped it
    finally:
        if ranks.rank == 0 and path:
            os.unlink(path)
    if mapped is None or failures:
        raise NanoError(_no_room(folder, size, failures[0]))
    return mapped


def map_by_name(path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes of a file that the first rank to come makes at `path`; nothing is exchanged.

    Raises
    ------
    NanoError
        If this rank cannot make or map the file.
    """
    try:
        make_at_once(str(path), size)
        return map_whole(str(path), size)
    except OSError as error:
        raise NanoError(_no_room(str(path.parent), size, str(error))) from error


def _make(folder: str, size: int) -> tuple[str | None, str | None]:
    """Make a file of `size` bytes, and return its path, or else what is in the way."""
    path = os.path.join(folder, f"averaging-{uuid.uuid4().hex}")
    try:
        make(path, size)
    except OSError as error:
        return None, str(error)
    return path, None


def _map(path: str | None, size: int) -> tuple[mmap.mmap | None, str | None]:
    if path is None:
        return None, None
    try:
        return map_whole(path, size), None
    except (OSError, NanoError) as error:
        return None, str(error)


def _no_room(folder: str, size: int, reason: str) -> str:
    got = f"{size / 2**20:.0f} MiB of shared memory in {folder} could not be allocated ({reason})"
    hint = "Free some of it; give a container more, for example docker run --shm-size=1g"
    return error_message(got, "the ranks of one host exchange their values there", hint)
