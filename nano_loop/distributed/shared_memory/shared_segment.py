"""Memory that the ranks of one host map together, and counters in it by which they wait for each other."""

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

#: Bytes of a cache line on any CPU, and of two neighbours that are fetched together: what ranks write lies apart.
LINE = 128
_WORD = 8
_RETURNED, _FAILED = 1, 2  # what a rank that has left shows
_give_way = getattr(os, "sched_yield", lambda: None)  # not on every Unix


class SharedSegment:
    """Memory that all ranks see: 64-bit counters, each on its own cache line, and bytes behind them.

    A counter is written by one rank, and only grows.

    Parameters
    ----------
    ranks : Ranks
        The ranks that share it.
    counters : int
        How many counters each rank has. The words behind one, up to its line's end, are for what goes with it.
    nbytes : int
        How many bytes.
    mapped : callable
        Is given the size of both together, and returns that much memory, which all ranks map.
    """

    def __init__(self, ranks: Ranks, counters: int, nbytes: int, mapped: Callable[[int], mmap.mmap]) -> None:
        start = -(-(counters + 1) * ranks.size * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mapped(start + nbytes)  # one more counter than asked for says who has left
        self.words = memoryview(memory)[:start].cast("q")
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)[start:]
        self._ranks = ranks
        self._unfinished = False
        self._left = self.places(counters)
        self._lock = threading.Lock()

    def places(self, counter: int) -> list[int]:
        """Return where among the words a counter is, by rank."""
        first = counter * self._ranks.size
        return [(first + rank) * LINE // _WORD for rank in range(self._ranks.size)]

    def begin(self) -> None:
        """Note that a collective begins; refuse it after one that was interrupted."""
        if self._unfinished:
            raise NanoError(_OUT_OF_STEP)
        self._unfinished = True

    def end(self) -> None:
        """Note that the collective has been finished."""
        self._unfinished = False

    def leave(self, *, returned: bool = True) -> None:
        """Announce that this rank will not change its counters again: a rank that waits for them raises.

        Parameters
        ----------
        returned : bool
            Whether the rank has returned from the loop, rather than failed.
        """
        self.publish(self._left[self._ranks.rank], _RETURNED if returned else _FAILED)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has announced that it leaves."""
        return self.words[self._left[rank]] != 0

    def publish(self, place: int, value: int) -> None:
        """Set the counter at `place`: a rank that sees its new value sees all that this rank has written before."""
        self.fence()
        self.words[place] = value

    def wait(self, places: Sequence[int], value: int, what: str = AVERAGING) -> None:
        """Wait until the counters of all ranks, which are at `places`, are at `value` or beyond.

        `what` names the collective that this rank is in.

        Raises a NanoError where a rank that is behind has left, waits for this one elsewhere, or takes too long, and
        what `Ranks.check` raises.
        """
        words = self.words
        for rank, place in enumerate(places):
            if words[place] < value:
                self._wait_for(rank, place, value, what)
        self.fence()

    def fence(self) -> None:
        """Order this thread's memory accesses: no CPU sees one from after the fence before one from ahead of it.

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

    def _wait_for(self, rank: int, place: int, value: int, what: str) -> None:
        started = time.monotonic()

        def arrived() -> bool:
            if self.words[place] >= value:
                return True
            _give_way()  # where ranks share a core, the one that is waited for may be waiting for it
            return False

        waits = self._ranks.context.waits
        wait = None if waits is None else waits.begin(self._ranks.names[rank], what)

        def look_around() -> None:
            self._ranks.check()
            if self.has_left(rank):
                self.fence()
                if not arrived():  # it may have arrived, and left, since we looked
                    raise RankLeftError(self._has_left(rank, what), self._ranks.names[rank])
            if time.monotonic() - started > self._ranks.timeout:
                raise RankLateError(self._is_late(rank, what), self._ranks.names[rank])
            if wait is not None and (ring := wait.look()):
                raise NanoError(mismatch_message(self._ranks.names[self._ranks.rank], ring))

        try:
            wait_until(arrived, look_around)
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
        name, own_name = self._ranks.names[rank], self._ranks.names[self._ranks.rank]
        purpose = "average gradients" if what == AVERAGING else "exchange values"
        got = f"rank {own_name} has waited {self._ranks.timeout:g} seconds for rank {name} to {purpose}"
        hint = f"Check what rank {name} is doing, or pass a longer timeout if it is working"
        return with_own_line(error_message(got, "every rank has to get there within the timeout", hint), own_name)


_OUT_OF_STEP = error_message(
    "a collective after one that was interrupted", "the ranks are out of step", "Start another run"
)
