"""Workers are watched by what they have in common, whatever has started them: no pipes and no processes are needed."""

import contextlib

import pytest

from nano_loop import NanoWorkerError
from nano_loop.distributed.comm.ranks import RankLeftError, wait_until
from nano_loop.distributed.launch.ending import running_together
from nano_loop.distributed.launch.failure import Failure, Kind, died, raised
from nano_loop.distributed.launch.workers import Workers
from nano_loop.errors import RankLateError

pytestmark = pytest.mark.usefixtures("nothing_left")


class Remote:
    """A worker as an actor of a cluster would be: it is asked, and there is nothing to wait for."""

    sources = ()

    def __init__(self, rank, failure=None, finishes=True):
        self.rank, self.failure, self.finishes = rank, failure, finishes
        self.ready = self.finished = False
        self.calls = []

    def poll(self):
        self.ready = True
        if self.failure is None:
            self.finished = self.finishes
        return self.failure

    def stack_dump(self):
        return "in a loop"

    def kill(self):
        self.calls.append("kill")

    def close(self):
        self.calls.append("close")


@contextlib.contextmanager
def watched(*remotes):
    workers = Workers(remotes)
    try:
        yield workers
    finally:
        workers.end()
    assert all(remote.calls[-2:] == ["kill", "close"] for remote in remotes)


def test_run_ends_when_all_have_finished():
    with watched(Remote(1), Remote(2)) as workers:
        workers.wait_until_ready(5)
        with running_together(workers, contextlib.nullcontext(), 5):
            pass
        assert workers.finished == [1, 2]


def run_beside(*remotes, body=lambda: None, timeout=5):
    with watched(*remotes) as workers, running_together(workers, contextlib.nullcontext(), timeout):
        body()


def test_lost_connection_of_rank_0_is_raised_as_the_failure_that_caused_it():
    def lose():
        raise RankLeftError("rank 1 has left", 1)

    lost = Failure(1, Kind.ECHO, "raised RuntimeError: connection reset by peer", "Wait")
    killed = died(2, last_words="out of memory")  # nobody knows its exit code
    with pytest.raises(NanoWorkerError, match="rank 2 ended its process:") as caught:
        run_beside(Remote(1, lost), Remote(2, killed), body=lose)
    assert (caught.value.rank, caught.value.exitcode, caught.value.traceback) == (2, None, "out of memory")


def test_every_rank_that_may_be_late_is_shown_where_it_is():
    late = raised(1, RankLateError("rank 1 has waited 12 seconds for the others"), "")
    with watched(Remote(1, late), Remote(2, finishes=False)) as workers:
        error = workers.await_failure(5).as_error()
    assert str(error).startswith("rank 1 has waited 12 seconds for the others\n\nrank 0:\n")
    assert str(error).endswith("\n\nrank 2:\nin a loop")
    assert error.rank == 0


def test_check_raises_while_rank_0_waits():
    with (
        watched(Remote(1, died(1, -11))) as workers,
        pytest.raises(NanoWorkerError, match="with SIGSEGV"),
    ):
        wait_until(lambda: False, workers.check)


def test_rank_that_does_not_finish_is_named_after_the_timeout():
    with pytest.raises(NanoWorkerError, match=r"rank 1 did not return .* within 0.3 s: .*same number of steps"):
        run_beside(Remote(1, finishes=False), timeout=0.3)
