"""Locks by which ranks of one host know that another's process has ended, where nano_loop has not started it.

Each rank locks a separate file in the private folder. The kernel takes the lock away when the process ends,
however it ends. A lock of this kind belongs to a process, not to the processes that it forks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.failure import died
from nano_loop.distributed.shared_memory.shared_file import make, open_private

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

    Attributes
    ----------
    has_left : callable
        Returns whether a rank has announced its end, so that its process may be gone.
    """

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.has_left: Callable[[int], bool] = lambda rank: False
        self._ranks = ranks
        self._folder = folder
        self._descriptors: dict[int, int] = {}  # of the others, by rank
        self._looked = time.monotonic()
        self._lock = self._hold()

    def check(self) -> None:
        """Raise a `NanoWorkerError` if the process of another rank has ended without leaving the run."""
        if time.monotonic() < self._looked + _INTERVAL:
            return
        self._looked = time.monotonic()
        for rank in range(self._ranks.size):
            # It may have left, and ended, since we looked at its lock.
            if rank != self._ranks.rank and self.is_dead(rank) and not self.has_left(rank):
                raise died(rank).as_error()

    def is_dead(self, rank: int) -> bool:
        """Whether the process of a rank that has been there is gone."""
        try:
            fcntl.lockf(self._descriptor(rank), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # that rank holds it, or has not come yet
            return False
        fcntl.lockf(self._descriptor(rank), fcntl.LOCK_UN)
        return True

    def open_all(self) -> None:
        """Open the locks of the ranks, once all have come: rank 0 deletes the folder as soon as it leaves the run."""
        for rank in range(self._ranks.size):
            if rank != self._ranks.rank:
                with suppress(OSError):
                    self._descriptor(rank)

    def _descriptor(self, rank: int) -> int:
        if rank not in self._descriptors:
            self._descriptors[rank] = open_private(str(self._folder / f"alive-{rank}"))
        return self._descriptors[rank]

    def close(self) -> None:
        """Give the lock back."""
        for descriptor in (self._lock, *self._descriptors.values()):
            os.close(descriptor)
        self._descriptors.clear()

    def _hold(self) -> int:
        path, unseen = (str(self._folder / f"{name}-{self._ranks.rank}") for name in ("alive", "coming"))
        make(unseen, 0)
        descriptor = open_private(unseen)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unseen, path)  # so that it is locked when others see it
        return descriptor


@contextmanager
def watching_each_other(ranks: Ranks, folder: Path) -> Iterator[Liveness]:
    """Let every wait of the ranks of one host see that another's process has ended: nano_loop has not launched them."""
    launcher_s = ranks.check
    liveness = Liveness(ranks, folder)

    def check() -> None:
        launcher_s()
        liveness.check()

    ranks.check = check
    try:
        yield liveness
    finally:
        ranks.check = launcher_s
        liveness.close()
