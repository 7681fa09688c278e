"""How ranks of one host know that another's process has ended, where nano_loop has not started it.

Each rank locks a separate file in the private folder. The kernel takes the lock away when the process ends,
however it ends. A lock of this kind belongs to a process, not to the processes that it forks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nano_loop.distributed.launch.failure import died
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.transport.shared_file import make, open_private

if sys.platform != "win32":
    import fcntl

_INTERVAL = 0.2  # seconds between two looks at the others


class Liveness:
    """The locks of the ranks of one host.

    Parameters
    ----------
    ranks : Ranks
        Who they are.
    folder : pathlib.Path
        Their private folder.
    has_left : callable
        Returns whether a rank has announced its end, so that its process may be gone.
    """

    def __init__(self, ranks: Ranks, folder: Path, has_left: Callable[[int], bool]) -> None:
        self._ranks = ranks
        self._folder = folder
        self._has_left = has_left
        self._others: dict[int, int] = {}  # descriptors, by rank
        self._looked = time.monotonic()
        self._mine = self._hold()

    def check(self) -> None:
        """Raise a `NanoWorkerError` if the process of another rank has ended without leaving the run."""
        if time.monotonic() < self._looked + _INTERVAL:
            return
        self._looked = time.monotonic()
        for rank in range(self._ranks.size):
            # It may have left, and ended, since we looked at its lock.
            if rank != self._ranks.rank and self.is_dead(rank) and not self._has_left(rank):
                raise died(rank).as_error()

    def is_dead(self, rank: int) -> bool:
        """Whether the process of a rank that has been there is gone."""
        descriptor = self._descriptor(rank)
        if descriptor is None:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # held by that rank
            return False
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Give the lock back."""
        for descriptor in (self._mine, *self._others.values()):
            os.close(descriptor)
        self._others.clear()

    def _hold(self) -> int:
        path, unseen = (str(self._folder / f"{name}-{self._ranks.rank}") for name in ("alive", "coming"))
        make(unseen, 0)
        descriptor = open_private(unseen)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unseen, path)  # so that it is locked when others see it
        return descriptor

    def _descriptor(self, rank: int) -> int | None:
        if rank not in self._others:
            try:
                self._others[rank] = open_private(str(self._folder / f"alive-{rank}"))
            except FileNotFoundError:  # it has not come yet, or the run has ended and the folder is gone
                return None
        return self._others[rank]
