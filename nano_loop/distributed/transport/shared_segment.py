"""A file in memory that the ranks of one host map together, and counters in it by which they wait for each other.

The file is gone from its folder as soon as all ranks have mapped it, so whatever happens later leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Sequence

import torch

from nano_loop.distributed.ranks import RankLeftError, Ranks, wait_until
from nano_loop.errors import NanoError, problem

#: Bytes of a cache line on any CPU, and of two neighbours that are fetched together: what ranks write lies apart.
LINE = 128
_WORD = 8
_WRITTEN = 1 << 20  # bytes at a time
_give_way = getattr(os, "sched_yield", lambda: None)  # not on every Unix


class SharedSegment:
    """Memory that all ranks see: 64-bit counters, each on its own cache line, and bytes behind them.

    A counter is written by one rank, and only grows.

    Parameters
    ----------
    ranks : Ranks
        The ranks of this host. Collective.
    folder : str
        Where rank 0 makes the file for a moment: a file system in memory.
    counters : int
        How many counters each rank has. The words behind one, up to its line's end, are for what goes with it.
    nbytes : int
        How many bytes.

    Raises
    ------
    NanoError
        On every rank, where one of them cannot make or map the file, as when the file system is full.
    """

    def __init__(self, ranks: Ranks, folder: str, counters: int, nbytes: int) -> None:
        lines = (counters + 1) * ranks.size * LINE  # one more for those who have left
        start = -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = _map_together(ranks, folder, start + nbytes)
        self.words = memoryview(mapped)[:start].cast("q")
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)[start:]
        self._ranks = ranks
        self._left = self.places(counters)
        self._lock = threading.Lock()

    def places(self, counter: int) -> list[int]:
        """Return where among the words a counter is, by rank."""
        first = counter * self._ranks.size
        return [(first + rank) * LINE // _WORD for rank in range(self._ranks.size)]

    def leave(self) -> None:
        """Announce that this rank will not change its counters again: a rank that waits for them raises."""
        self.publish(self._left[self._ranks.rank], 1)

    def publish(self, place: int, value: int) -> None:
        """Set the counter at `place`: a rank that sees its new value sees all that this rank has written before."""
        self.fence()
        self.words[place] = value

    def wait(self, places: Sequence[int], value: int) -> None:
        """Wait until the counters of all ranks, which are at `places`, are at `value` or beyond.

        Raises a NanoError where a rank that is behind has left, or takes too long, and what `Ranks.check` raises.
        """
        words = self.words
        for rank, place in enumerate(places):
            if words[place] < value:
                self._wait_for(rank, place, value)
        self.fence()

    def fence(self) -> None:
        """Keep what this thread reads and writes before apart, for others too, from what it does after.

        A CPU such as ARM's may let others see a counter before the data that it announces, or read the data before the
        counter. A lock's release stays behind all before it, its acquisition ahead of all after it, and the CPU keeps
        a release and a later acquisition in order: nothing gets past the two. (In one ``with`` alone they stand the
        other way round, and both sides may slip into it.)
        """
        with self._lock:
            pass
        with self._lock:
            pass

    def close(self) -> None:
        """Forget the memory; it is unmapped when the last tensor that views it is gone."""
        # Not mmap.close(): torch would not keep it from unmapping what a tensor still views.
        self.words.release()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def _wait_for(self, rank: int, place: int, value: int) -> None:
        started = time.monotonic()

        def arrived() -> bool:
            if self.words[place] >= value:
                return True
            _give_way()  # where ranks share a core, the one that is waited for may be waiting for it
            return False

        def look_around() -> None:
            self._ranks.check()
            if self.words[self._left[rank]]:
                self.fence()
                if not arrived():  # it may have arrived, and left, since we looked
                    raise RankLeftError(_has_left(rank, self._ranks.rank), rank)
            if time.monotonic() - started > self._ranks.timeout:
                raise NanoError(_is_late(rank, self._ranks))

        wait_until(arrived, look_around)


def _map_together(ranks: Ranks, folder: str, size: int) -> mmap.mmap:
    path, unmade = _make(folder, size) if ranks.rank == 0 else (None, None)
    try:
        path, unmade = ranks.broadcast((path, unmade))
        mapped, unmapped = _map(path, size)
        failures = [each for each in (unmade, *ranks.gather(unmapped)) if each]  # from here on all have mapped it
    finally:
        if ranks.rank == 0 and path:
            os.unlink(path)
    if mapped is None or failures:
        given = f"{size / 2**20:.0f} MiB of shared memory in {folder} could not be allocated ({failures[0]})"
        advice = "Free some of it; give a container more, for example docker run --shm-size=1g"
        raise NanoError(problem(given, "the ranks of one host average their gradients there", advice))
    return mapped


def _make(folder: str, size: int) -> tuple[str | None, str | None]:
    """Make a file of `size` bytes, and return its path, or else what is in the way."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="averaging-", dir=folder)
    except OSError as error:
        return None, str(error)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Written, not only made long: memory that is not there when it is first used is a SIGBUS.
            for start in range(0, size, _WRITTEN):
                file.write(bytes(min(_WRITTEN, size - start)))
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, OSError):
            return None, str(error)
        raise
    return path, None


def _map(path: str | None, size: int) -> tuple[mmap.mmap | None, str | None]:
    if path is None:
        return None, None
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size), None
    except OSError as error:
        return None, str(error)


def _has_left(rank: int, waiting: int) -> str:
    given = f"rank {rank} has returned from train, and rank {waiting} still averages gradients"
    advice = "Make every rank run the same number of steps; an early break on a rank's own loss does not"
    return problem(given, "all ranks have to run the same number of steps", advice)


def _is_late(rank: int, ranks: Ranks) -> str:
    given = f"rank {ranks.rank} has waited {ranks.timeout:g} seconds for rank {rank} to average gradients"
    advice = f"Check what rank {rank} is doing, or pass a longer timeout if it is working"
    return problem(given, "every rank has to reach the averaging within the timeout", advice)
