"""Rank 0's side of the workers: starts them, watches them, and ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from nano_loop.distributed.launch.child import Start, Worker, death_of, started
from nano_loop.distributed.launch.failure import Failure, Kind, first

_LOOKING = 0.1  # seconds between two looks at the processes
_GRACE = 1.0  # seconds that an echo waits for its cause


class Workers:
    """The workers of one run, and the thread that watches them.

    Parameters
    ----------
    starts : sequence of Start
        One for each worker.
    """

    def __init__(self, starts: Sequence[Start]) -> None:
        self._workers: list[Worker] = []
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._changed = threading.Condition()
        self._ending = False
        self.interrupted = False  # whether the user has
        try:
            for start in starts:
                self._workers.append(started(start))
        except BaseException:
            self._close()
            raise
        self._watch = threading.Thread(target=self._look, name="nano_loop watch", daemon=True)
        self._watch.start()

    @property
    def finished(self) -> list[int]:
        """The ranks that have returned from the loop."""
        return [worker.rank for worker in self._workers if worker.finished]

    def go(self) -> None:
        """Tell every worker that its payload is there."""
        for worker in self._workers:
            worker.go()

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until every worker has imported what it needs and read its payload."""
        self._wait("ready", timeout, "did not start", "Look whether its Python starts, or give it a longer timeout")

    def wait_until_finished(self, timeout: float) -> None:
        """Wait until the loop has returned on every worker."""
        advice = "Let all ranks take the same number of steps, or give a longer timeout"
        self._wait("finished", timeout, "did not return from the loop after rank 0 had", advice)

    def check(self) -> None:
        """Raise a `NanoWorkerError` if a worker has failed, once it is known which was the first."""
        failure = self._decided()
        if failure is not None:
            raise failure.as_error()

    def await_failure(self, timeout: float) -> Failure | None:
        """Return the first failure, waiting for one that has not been seen yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._decided() is not None, timeout)
            return self._decided() or first(self._failures)

    def interrupt(self) -> None:
        """Kill every worker because the user has interrupted the run, which ends rank 0's wait for them."""
        self.interrupted = True
        self.kill()

    def kill(self) -> None:
        """Kill every worker."""
        for worker in self._workers:
            worker.kill()

    def end(self) -> None:
        """Kill every worker, show what it still had to say, and stop watching."""
        self._ending = True
        self.kill()
        self._watch.join()
        self._close()

    def _close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _wait(self, state: str, timeout: float, what: str, advice: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                self.check()
                waiting = [worker.rank for worker in self._workers if not getattr(worker, state)]
                if not waiting:
                    return
                if time.monotonic() > deadline:
                    raise Failure(waiting[0], Kind.CAUSE, f"{what} within {timeout:g} s", advice).as_error()
                self._changed.wait(_LOOKING)  # short, so that Ctrl-C is heard

    def _decided(self) -> Failure | None:
        failure = first(self._failures)
        if failure is None or failure.kind is Kind.CAUSE:
            return failure
        assert self._failed_at is not None
        return failure if time.monotonic() > self._failed_at + _GRACE else None

    def _look(self) -> None:
        """Watch until the run has ended and all has been read."""
        while True:
            heard = self._hear()
            for worker in self._workers:
                self._note(death_of(worker))
            if self._decided() is not None:
                self.kill()  # which also ends what rank 0 waits for
            with self._changed:
                self._changed.notify_all()
            silent = not heard or not any(worker.sources for worker in self._workers)
            if self._ending and silent and all(worker.process.poll() is not None for worker in self._workers):
                return

    def _hear(self) -> bool:
        """Read what workers have written, and say whether there was anything; it waits a moment for it."""
        sources = {source: worker for worker in self._workers for source in worker.sources}
        if not sources:
            time.sleep(_LOOKING)
        heard = wait(list(sources), _LOOKING) if sources else []
        for source in heard:
            self._note(sources[source].read(source))
        return bool(heard)

    def _note(self, failure: Failure | None) -> None:
        if failure is None or any(each.rank == failure.rank for each in self._failures):
            return
        with self._changed:
            self._failed_at = self._failed_at or time.monotonic()
            self._failures.append(failure)
