"""Workers are watched through their common interface, whatever started them, without pipes and processes."""

import contextlib
import time

import pytest

from nano_loop import NanoWorkerError
from nano_loop.distributed.launch.ending import running_together
from nano_loop.distributed.launch.failure import Failure, Kind, died, raised
from nano_loop.distributed.launch.interrupts import Interrupts
from nano_loop.distributed.launch.workers import Workers
from nano_loop.errors import RankLateError, RankLeftError

pytestmark = pytest.mark.usefixtures("nothing_left")


class Remote:
    """A worker like an actor of a cluster: it can only be polled, not waited for."""

    sources = ()

    def __init__(self, rank, failure=None, finishes=True, after=0.0):
        self.rank, self.failure, self.finishes = rank, failure, finishes
        self.fails_at = time.monotonic() + after
        self.ready = self.finished = False
        self.calls = []

    def poll(self):
        self.ready = True
        if self.failure is None:
            self.finished = self.finishes
        return self.failure if time.monotonic() >= self.fails_at else None

    def stack_dump(self):
        time.sleep(0.1)
        return "" if "kill" in self.calls else "in a loop"

    def kill(self):
        self.calls.append("kill")

    def close(self):
        self.calls.append("close")


@contextlib.contextmanager
def watched(*remotes, latest_news=0.0):
    with Interrupts() as interrupts:
        workers = Workers(remotes, interrupts, latest_news)
        try:
            yield workers
        finally:
            workers.end()
    assert all(remote.calls[-2:] == ["kill", "close"] for remote in remotes)


def run_beside(*remotes, body=lambda: None, timeout=5, **watching):
    with watched(*remotes, **watching) as workers, running_together(workers, contextlib.nullcontext, timeout):
        body()


def test_lost_connection_of_rank_0_is_raised_as_the_failure_that_caused_it():
    def lose():
        raise RankLeftError("rank 1 has left", 1)

    lost = Failure(1, Kind.ECHO, "raised RuntimeError: connection reset by peer", "Wait")
    killed = died(2, last_words="out of memory")  # its exit code is unknown
    with pytest.raises(NanoWorkerError, match="rank 2 ended its process:") as caught:
        run_beside(Remote(1, lost, after=0.5), Remote(2, killed, after=0.5), body=lose)
    assert (caught.value.rank, caught.value.exitcode, caught.value.traceback) == (2, None, "out of memory")


def test_lost_connections_wait_for_the_news_of_a_lost_host():
    def lose():
        raise RankLeftError("rank 2 has left", 2)

    lost = Failure(1, Kind.ECHO, "raised RuntimeError: connection reset by peer", "Wait")
    with pytest.raises(NanoWorkerError, match="rank 2 ended its process:"):
        run_beside(Remote(1, lost), Remote(2, died(2), after=1.5), body=lose, latest_news=60)


def waits(rank, late=None, where=""):
    """Return the report of a rank that waited in vain for a certain rank, or for any."""
    return raised(rank, RankLateError(f"rank {rank} has waited", late), where)


@pytest.mark.slow
def test_every_rank_that_may_be_late_is_shown_where_it_is():
    with pytest.raises(NanoWorkerError, match=r"^rank 1 has waited\n\nrank 0:\n") as caught:
        run_beside(Remote(1, waits(1)), Remote(2, finishes=False), body=lambda: time.sleep(3))
    assert "time.sleep(3)" in str(caught.value)
    assert str(caught.value).endswith("\n\nrank 2:\nin a loop")
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("first", "named"),
    [(0, 0), (1, None), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, None), (1, 0)))],
)
def test_ranks_that_wait_for_each_other_blame_the_one_that_waits_for_nobody(first, named):
    def wait():
        time.sleep(0.3 * first)
        raise RankLateError("rank 0 has waited", None)

    with pytest.raises(NanoWorkerError) as caught:
        run_beside(Remote(1, waits(1, named), after=0.3 * (1 - first)), Remote(2, finishes=False), body=wait)
    assert str(caught.value) == f"rank {first} has waited\n\nrank 2:\nin a loop"
    assert caught.value.rank == 2


def test_ranks_that_all_wait_are_shown_where_they_have_waited():
    def wait():
        raise RankLateError("rank 0 has waited", 1)

    with pytest.raises(NanoWorkerError) as caught:
        run_beside(Remote(1, waits(1, 0, "in barrier"), after=0.3), body=wait)
    assert str(caught.value) == "rank 0 has waited\n\nrank 1:\nin barrier"
