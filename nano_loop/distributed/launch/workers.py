"""Rank 0's handling of the worker processes of any launcher: it watches them and ends them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from nano_loop.distributed.comm.system_limits import SHARED_MEMORY, limits_in_words, start_thread
from nano_loop.distributed.launch.failure import Failure, Kind, first
from nano_loop.distributed.launch.interrupts import Interrupts

_INTERVAL = 0.1  # seconds between checks of the workers
_GRACE = 1.0  # seconds that a failure waits for its cause, and a rank that waited in vain for others that did


class Worker(ABC):
    """A rank's process, as seen by rank 0; `poll` is called in the watching thread, `kill` and `stack_dump` in any."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ready = False  # whether it has read the payload; set by `poll`
        self.finished = False  # whether its task has returned; set by `poll`

    @property
    def sources(self) -> Sequence[Any]:
        """Objects for `multiprocessing.connection.wait`, so that `poll` is called when there is news."""
        return ()

    @abstractmethod
    def poll(self) -> Failure | None:
        """Process news from the worker without waiting; return its failure once there is one."""

    @abstractmethod
    def stack_dump(self) -> str:
        """Return where the process is in its Python code, as far as this can be determined within a few seconds."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and everything that it has started immediately, also if it has already ended."""

    @abstractmethod
    def close(self) -> None:
        """Process remaining news and release all resources of rank 0 for it; called last, after `kill`."""


class Workers:
    """The workers of one run, which `end` closes, and the thread that watches them.

    The loss of a process or its host is detected within `latest_news` seconds. Errors that it causes on other ranks
    wait for this long.
    """

    def __init__(self, workers: Iterable[Worker], interrupts: Interrupts, latest_news: float = 0.0) -> None:
        self.interrupts = interrupts
        self.latest_news = latest_news
        self._workers: list[Worker] = []
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._failure: Failure | None = None  # the failure that ends the run
        self._changed = threading.Condition()
        self._ending = False
        self._thread: int | None = threading.get_ident()  # rank 0's thread while it is in the loop
        self._watch = threading.Thread(target=self._watch_workers, name="nano_loop watch", daemon=True)
        with ExitStack() as stack:
            for worker in workers:
                self._workers.append(worker)
                stack.callback(worker.close)
            with limits_in_words("the processes of a run could not be watched", SHARED_MEMORY):
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
        """Record that rank 0 has left the loop, and its failure, if that may end the run."""
        self._thread = None
        self._note(failure)

    def stack_dump(self, rank: int) -> str:
        """Return where a rank is in its Python code, including rank 0."""
        if rank == 0:
            frame = sys._current_frames().get(self._thread or 0)
            return "".join(traceback.format_stack(frame)) if frame is not None else ""
        return next((worker.stack_dump() for worker in self._workers if worker.rank == rank), "")

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until every worker has finished its imports and read its payload."""
        advice = "Check that its Python starts, or pass a longer timeout"
        self._wait(lambda worker: worker.ready, timeout, "did not start", advice)

    def wait_until_finished(self, timeout: float) -> None:
        """Wait until the loop has returned on every worker."""
        advice = "Make every rank run the same number of steps, or pass a longer timeout"
        self._wait(lambda worker: worker.finished, timeout, "did not return from the loop after rank 0", advice)

    def check(self) -> None:
        """Raise a `NanoWorkerError` if a worker has failed, once the first failure is known."""
        if self._failure is not None:
            raise self._failure.as_error()

    def await_failure(self, timeout: float, of: int | None = None) -> Failure | None:
        """Return the first failure, waiting for one not seen yet until rank `of`, or all ranks, have finished."""

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
        """Kill every worker, stop watching, and close the workers."""
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
                self._changed.wait(_INTERVAL)  # short, so that Ctrl-C is handled

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
        """Convert the failure of a rank that waited in vain into one of the late ranks, with their locations.

        These are the ranks that have not waited in vain, or the others if all have.
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
                self.kill()  # also ends rank 0's waits for them
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
