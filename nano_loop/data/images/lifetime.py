"""The place of the cache, its size, and its lifetime.

A cache in memory belongs to the process that created it, and lives as long as one of its datasets, so that a function
that is called once per epoch finds it again. A folder that the user has named is persistent.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil

from nano_loop.cpu.cgroup import read_memory_limit
from nano_loop.cpu.tree import Tree
from nano_loop.data.images.store import Store
from nano_loop.distributed.comm.ranks import ALONE, Ranks
from nano_loop.distributed.comm.system_limits import SHARED_MEMORY
from nano_loop.distributed.launch.shared_folder import delete_abandoned, held, refuse_foreign_folder
from nano_loop.errors import NanoError
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.storage.trusted_files import make_folder, open_folder, resolved

_PREFIX = "nano_loop-images-"
#: By default, a cache may use the memory divided by this.
_SHARE = 4
#: A cache in memory may use this fraction of the free space.
_ROOM_LEFT = 0.9


class _Memory:
    """The cache in memory of this process. At its end `Finalize` deletes it: forked processes skip `atexit`."""

    def __init__(self, limit: int) -> None:
        self.process = os.getpid()
        folder = make_folder(f"{_PREFIX}{self.process}-", (_parent(limit), SHARED_MEMORY))
        delete_abandoned(folder.parent, _PREFIX)
        stack = ExitStack()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(held(folder))
        Finalize(self, stack.close, exitpriority=-1)  # after its workers have ended
        self.store = Store(folder, 0, sums=False)
        self.allow(limit)

    def allow(self, limit: int) -> None:
        """Set the maximum bytes of the entries, within the free space."""
        room = self.store.usage().size + int(_ROOM_LEFT * shutil.disk_usage(self.store.folder).free)
        self.store.allow(min(limit, room))


_memories: Any = WeakIdKeyDictionary()  # the `_Memory` that datasets keep alive


def store_for(datasets: Sequence[Any], choice: int | str | None, ranks: Ranks = ALONE) -> Store:
    """Return the cache for datasets and ranks. One in memory lives as long as any dataset. Collective.

    `choice` is the bytes of memory, the path of a folder, or None for a quarter of the memory.
    """
    if isinstance(choice, str):
        return _in_folder(Path(choice))
    if ranks.size == 1:
        return _in_memory(datasets, choice)
    own = None
    if ranks.local_rank == 0:
        with suppress(OSError, NanoError):  # the other ranks wait for an answer
            own = _in_memory(datasets, choice)
    for path in ranks.gather(str(own.folder) if own else "", what="image_cache"):
        if path and _is_ours(Path(path)):
            return own if own and str(own.folder) == path else Store(Path(path), choice or default_limit(), sums=False)
    return own or _in_memory(datasets, choice)


def default_limit() -> int:
    """Return the default size in bytes of a cache in memory. It depends on free memory and on cgroup limits."""
    available = psutil.virtual_memory().available
    allowed = read_memory_limit(Tree("/"))
    return min(available, allowed or available) // _SHARE


def _in_folder(folder: Path) -> Store:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = resolved(folder)
    os.close(open_folder(folder))
    store = Store(folder, None, sums=True)
    store.tidy()
    return store


def _in_memory(datasets: Sequence[Any], limit: int | None) -> Store:
    # A forked process finds the cache of its parent.
    memory = next((memory for memory in [*_memories.values()] if memory.process == os.getpid()), None)
    if memory is None:
        memory = _Memory(limit or default_limit())
    elif limit is not None:
        memory.allow(limit)
    for dataset in datasets:
        _memories[dataset] = memory
    return memory.store


def _parent(limit: int) -> Path:
    """Return the file system in memory, or the folder for temporary files if that is too small."""
    temporary = Path(tempfile.gettempdir())
    if not os.access(SHARED_MEMORY, os.W_OK):
        return temporary
    shared, other = (shutil.disk_usage(folder).free for folder in (SHARED_MEMORY, temporary))
    return SHARED_MEMORY if _ROOM_LEFT * shared >= limit or other <= shared else temporary


def _is_ours(folder: Path) -> bool:
    try:
        refuse_foreign_folder(folder)
    except NanoError:
        return False
    return folder.name.startswith(_PREFIX)
