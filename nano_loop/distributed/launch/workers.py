"""Rank 0's side of the processes that it has started, whatever has started them: watches them, and ends them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from nano_loop.distributed.comm.system_limits import SHARED_MEMORY, limits_in_words, start_thread
from nano_loop.distributed.launch.failure import Failure, Kind, first
from nano_loop.distributed.launch.interrupts import Interrupts

_INTERVAL = 0.1  # seconds between two looks at the workers
_GRACE = 1.0  # seconds that a failure waits for its cause, and a rank that has waited for others that have


class Worker(ABC):
    """A process that a launcher has started for a rank, as rank 0 watches it.

    `poll` is called in the thread that watches, `kill` and `stack_dump` in any, and `close` at last.

    Parameters
    ----------
    rank : int
        Its rank.

    Attributes
    ----------
    ready, finished : bool
        Whether it has read the payload, and whether the task has returned there; `poll` sets them.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ready = self.finished = False

    @property
    def sources(self) -> Sequence[Any]:
        """What `multiprocessing.connection.wait` can wait for, so that `poll` is called when there is news."""
        return ()

    @abstractmethod
    def poll(self) -> Failure | None:
        """Take in what is new of the process, without waiting; return its failure once there is one."""

    @abstractmethod
    def stack_dump(self) -> str:
        """Return where the process is in its Python code, as far as it can be seen within a few seconds."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and all that it has started, at once; also one that has ended already."""

    @abstractmethod
    def close(self) -> None:
        """Take in what is left, and free all that rank 0 holds for it; called last, after `kill`."""


class Workers:
    """The workers of one run, and the thread that watches them.

    Parameters
    ----------
    workers : sequence of Worker
        Those that have been started; `end` closes them.
    interrupts : Interrupts
        Of rank 0.
    latest_news : float
        Seconds until it is known that a process or its host is gone, where that may take long. An error that this
        causes on other ranks waits for it.

    Raises
    ------
    NanoError
        If there can be no such thread; the workers are closed.
    """

    def __init__(self, workers: Sequence[Worker], interrupts: Interrupts, latest_news: float = 0.0) -> None:
        self.interrupts = interrupts
        self.latest_news = latest_news
        self._workers = workers
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._failure: Failure | None = None  # that ends the run
        self._changed = threading.Condition()
        self._ending = False
        self._thread: int | None = threading.get_ident()  # of rank 0, in the loop
        self._watch = threading.Thread(target=self._watch_workers, name="nano_loop watch", daemon=True)
        with limits_in_words("the processes of a run could not be watched", SHARED_MEMORY), ExitStack() as stack:
            for worker in workers:
                stack.callback(worker.close)
            start_thread(self._watch)
            stack.pop_all()

    @property
    def finished(self) -> list[int]:
        """The ranks that have returned from the loop."""
        return [worker.rank for worker in self._workers if worker.finished]

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not returned from the loop."""
        return [worker.rank for worker in self._workers if not worker.finished]

    def leave(self, failure: Failure | None = None) -> None:
        """Note that rank 0 is in the loop no more, and its failure, if that may end the run."""
        self._thread = None
        self._note(failure)

    def stack_dump(self, rank: int) -> str:
        """Return where a rank is in its Python code, rank 0 included."""
        if rank == 0:
            frame = sys._current_frames().get(self._thread or 0)
            return "".join(traceback.format_stack(frame)) if frame is not None else ""
        return next((worker.stack_dump() for worker in self._workers if worker.rank == rank), "")

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until every worker has imported what it needs and read its payload."""
        advice = "Check that its Python starts, or pass a longer timeout"
        self._wait(lambda worker: worker.ready, timeout, "did not start", advice)

    def wait_until_finished(self, timeout: float) -> None:
        """Wait until the loop has returned on every worker."""
        advice = "Make every rank run the same number of steps, or pass a longer timeout"
        self._wait(lambda worker: worker.finished, timeout, "did not return from the loop after rank 0", advice)

    def check(self) -> None:
        """Raise a `NanoWorkerError` if a worker has failed, once it is known which was the first."""
        if self._failure is not None:
            raise self._failure.as_error()

    def await_failure(self, timeout: float, of: int | None = None) -> Failure | None:
        """Return the first failure, waiting for one that is not seen yet, until rank `of`, or all, have finished."""

        def is_known() -> bool:
            waiting = self.unfinished
            return self._failure is not None or not waiting or (of is not None and of not in waiting)

        with self._changed:
            self._changed.wait_for(is_known, timeout)
            return self._failure or first(self._failures)

    def kill(self) -> None:
        """Kill every worker."""
        for worker in self._workers:
            worker.kill()

    def end(self) -> None:
        """Kill every worker, stop watching, and close them."""
        self._ending = True
        self.kill()
        self._watch.join()
        for worker in self._workers:
            worker.close()

    def _wait(self, done: Callable[[Worker], bool], timeout: float, what: str, advice: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                self.check()
                waiting = [worker.rank for worker in self._workers if not done(worker)]
                if not waiting:
                    return
                if time.monotonic() > deadline:
                    late = Failure(waiting[0], Kind.CAUSE, f"{what} within {timeout:g} s", advice)
                    late.traceback = self.stack_dump(late.rank) or None
                    raise late.as_error()
                self._changed.wait(_INTERVAL)  # short, so that Ctrl-C is heard

    def _decisive_failure(self) -> Failure | None:
        failure = first(self._failures)
        if failure is None or failure.kind is Kind.CAUSE:
            return failure
        assert self._failed_at is not None
        grace = max(_GRACE, self.latest_news) if failure.kind is Kind.ECHO else _GRACE
        if time.monotonic() <= self._failed_at + grace:
            return None
        return self._located(failure) if failure.kind is Kind.LATE else failure

    def _located(self, failure: Failure) -> Failure:
        """Return the failure of a rank that has waited in vain as one of the ranks that are late, with where they are.

        The rank that it has waited for may wait itself: those are late that have not waited in vain, or, where all
        have, the others.
        """
        known = {other.rank: other for other in self._failures}
        running = [*([] if self._thread is None else [0]), *self.unfinished]
        late = sorted((rank for rank in running if rank not in known), key=lambda rank: rank != failure.late)
        places = {rank: self.stack_dump(rank) for rank in late}
        if not places:
            places = {rank: other.traceback or "" for rank, other in known.items() if rank != failure.rank}
        if not places:
            return failure
        shown = "\n\n".join(f"rank {rank}:\n{place.rstrip()}" for rank, place in places.items())
        first_late = next(iter(places))
        return replace(failure, rank=first_late, traceback=shown.removeprefix(f"rank {first_late}:\n"))

    def _watch_workers(self) -> None:
        while not self._ending:
            self._wait_for_news()
            for worker in self._workers:
                self._note(worker.poll())
            self._failure = self._failure or self._decisive_failure()
            if self._failure is not None:
                self.kill()  # which also ends what rank 0 waits for
            with self._changed:
                self._changed.notify_all()

    def _wait_for_news(self) -> None:
        sources = dict.fromkeys(source for worker in self._workers for source in worker.sources)
        if sources:
            wait([*sources], _INTERVAL)
        else:
            time.sleep(_INTERVAL)

    def _note(self, failure: Failure | None) -> None:
        if failure is None or any(known.rank == failure.rank for known in self._failures):
            return
        with self._changed:
            self._failed_at = self._failed_at or time.monotonic()
            self._failures.append(failure)
