"""The private folder of a run, whose files all ranks of one host can map."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder, in memory where this system has a file system there, and delete it on leaving."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f"nano_loop-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shared_memory_device() -> int:
    """Return the number of this host's shared-memory file system, which containers have each their own of."""
    return SHARED_MEMORY.stat().st_dev if SHARED_MEMORY.exists() else 0
