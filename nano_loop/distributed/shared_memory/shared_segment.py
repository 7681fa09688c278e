"""Memory that the ranks of one host map together, with counters for synchronization."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from nano_loop.distributed.comm.mismatch import AVERAGING, left_behind, mismatch_message, with_own_line
from nano_loop.distributed.comm.ranks import ITERATION, Ranks, wait_until
from nano_loop.errors import NanoError, RankLateError, RankLeftError, error_message

#: Bytes of two cache lines, which are prefetched together. Data of different ranks is this far apart.
LINE = 128
_WORD = 8
_RETURNED, _FAILED = 1, 2  # published by a rank that has left
_give_way = getattr(os, "sched_yield", lambda: None)  # not available on every Unix


class SharedSegment:
    """Memory shared by all ranks: 64-bit counters, each on its own cache line, followed by `nbytes` bytes.

    Each counter, of which a rank has `counters`, is written by one rank and only increases. Its line has room for other
    data.
    """

    def __init__(self, ranks: Ranks, counters: int, nbytes: int, mapped: Callable[[int], mmap.mmap]) -> None:
        start = -(-(counters + 1) * ranks.size * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mapped(start + nbytes)  # an extra counter tells who has left
        self.words = memoryview(memory)[:start].cast("q")
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)[start:]
        self._ranks = ranks
        self._unfinished = False
        self._left = self.places(counters)
        self._lock = threading.Lock()

    def places(self, counter: int) -> list[int]:
        """Return the indices of a counter's words, by rank."""
        first = counter * self._ranks.size
        return [(first + rank) * LINE // _WORD for rank in range(self._ranks.size)]

    def begin(self) -> None:
        """Mark the start of a collective; raise an error after an interrupted one."""
        if self._unfinished:
            raise NanoError(_OUT_OF_STEP)
        self._unfinished = True

    def end(self) -> None:
        """Mark the end of the collective."""
        self._unfinished = False

    def leave(self, *, returned: bool = True) -> None:
        """Announce that this rank, which has `returned` or failed, counts no further: ranks that wait for it raise."""
        self.publish(self._left[self._ranks.rank], _RETURNED if returned else _FAILED)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has announced that it is leaving."""
        return self.words[self._left[rank]] != 0

    def publish(self, place: int, value: int) -> None:
        """Set the counter at `place`: a rank that sees the new value also sees everything this rank wrote before."""
        self.fence()
        self.words[place] = value

    def wait(self, places: Sequence[int], value: int, what: str = AVERAGING) -> None:
        """Wait until all ranks' counters have a `value`; raise if a rank has left, waits elsewhere, or is late."""
        words = self.words
        for rank, place in enumerate(places):
            if words[place] < value:
                self._wait_for(rank, place, value, what)
        self.fence()

    def fence(self) -> None:
        """Order this thread's memory accesses: no CPU sees accesses after the fence before accesses preceding it.

        On CPUs such as ARM's, a counter may become visible before the data that it announces, or the data may be read
        before the counter. Releasing a lock keeps all earlier accesses before it, acquiring one keeps all later
        accesses after it, and the CPU orders a release before a later acquisition: nothing can pass both. (A single
        ``with`` has the two in the opposite order, so accesses from both sides may move into it.)
        """
        with self._lock:
            pass
        with self._lock:
            pass

    def close(self) -> None:
        """Release the memory; it is unmapped when the last tensor that views it is gone."""
        # mmap.close() would unmap memory that torch's tensors still view.
        self.words.release()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def _wait_for(self, rank: int, place: int, value: int, what: str) -> None:
        started = time.monotonic()

        def arrived() -> bool:
            if self.words[place] >= value:
                return True
            _give_way()  # if ranks share a core, the other rank may be waiting for it
            return False

        waits = self._ranks.context.waits
        wait = None if waits is None else waits.begin(self._ranks.names[rank], what)

        def check_others() -> None:
            self._ranks.check()
            if self.has_left(rank):
                self.fence()
                if not arrived():  # it may have arrived and left in the meantime
                    raise RankLeftError(self._has_left(rank, what), self._ranks.names[rank])
            if time.monotonic() - started > self._ranks.timeout:
                raise RankLateError(self._is_late(rank, what), self._ranks.names[rank])
            if wait is not None and (ring := wait.look()):
                raise NanoError(mismatch_message(self._ranks.names[self._ranks.rank], ring))

        try:
            wait_until(arrived, check_others)
        finally:
            if wait is not None:
                wait.end()

    def _has_left(self, rank: int, what: str) -> str:
        name, own_name = self._ranks.names[rank], self._ranks.names[self._ranks.rank]
        still = "averages gradients" if what == AVERAGING else "exchanges values"
        if self.words[self._left[rank]] == _FAILED:
            got, expected = f"rank {name} has failed, and rank {own_name} still {still}", "a run needs all of its ranks"
            return error_message(got, expected, f"See the error of rank {name}")
        return left_behind(own_name, name, what if what == ITERATION else still, self._ranks.context.loop)

    def _is_late(self, rank: int, what: str) -> str:
        purpose = "average gradients" if what == AVERAGING else "exchange values"
        message = self._ranks.late_message(f"rank {self._ranks.names[rank]}", purpose)
        return with_own_line(message, self._ranks.names[self._ranks.rank])


_OUT_OF_STEP = error_message(
    "a collective after one that was interrupted", "the ranks are out of step", "Start another run"
)
