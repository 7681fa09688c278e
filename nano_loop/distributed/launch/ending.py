"""How the ranks of a run end together when one of them fails, and what rank 0 raises then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from nano_loop.distributed.launch.failure import Kind, kind_of
from nano_loop.distributed.launch.workers import Workers
from nano_loop.distributed.ranks import RankLeftError
from nano_loop.distributed.seat import Seat
from nano_loop.errors import NanoWorkerError, problem

_SAME_STEPS = "all ranks have to run the same number of steps"
_ADVICE = "Make every rank run the same number of steps"
_ECHO_WAITS = 3.0  # seconds that an error which another rank has caused waits for that rank's report


@contextmanager
def running_together(workers: Workers, joining: AbstractContextManager[Seat], timeout: float) -> Iterator[Seat]:
    """Run the body as rank 0 beside `workers`, until all have finished or one has failed.

    Parameters
    ----------
    workers : Workers
        The other ranks, about to join too.
    joining : context manager
        Connects the ranks, and gives rank 0's seat.
    timeout : float
        Seconds that rank 0 waits for the others after its body.

    Raises
    ------
    NanoWorkerError
        If another rank fails; the workers are killed then, as they are if the body raises.
    """
    with joining as seat, ending_together(workers):
        seat.ranks.check = workers.check
        yield seat
    with ending_together(workers, has_returned=True):
        workers.wait_until_finished(timeout)


@contextmanager
def ending_together(workers: Workers, *, has_returned: bool = False) -> Iterator[None]:
    """Kill the workers if rank 0 raises, and raise what came first."""
    try:
        yield
    except BaseException as error:
        cause = _cause_of(error, workers, has_returned)
        workers.kill()
        if cause is error:
            raise
        raise cause from cause.__cause__ or error


def _cause_of(error: BaseException, workers: Workers, has_returned: bool) -> BaseException:
    """Return what is to be raised for an exception of rank 0: itself, or what another rank has done."""
    if workers.interrupted:
        return KeyboardInterrupt()
    if has_returned:
        return _left_behind(error, workers)
    if kind_of(error) is Kind.CAUSE:
        return error
    failure = workers.await_failure(_ECHO_WAITS)
    if failure is not None and failure.kind is Kind.CAUSE:
        return failure.as_error()
    if isinstance(error, RankLeftError):
        return NanoWorkerError(str(error), rank=error.rank)
    for rank in workers.finished:
        given = f"rank {rank} has returned from train, and rank 0 waits for it"
        return NanoWorkerError(problem(given, _SAME_STEPS, _ADVICE), rank=rank)
    return failure.as_error() if failure is not None else error


def _left_behind(error: BaseException, workers: Workers) -> BaseException:
    """Return the error for a worker that lost its connection because rank 0 has returned from the loop."""
    failure = workers.await_failure(0)
    if failure is None or failure.kind is Kind.CAUSE:
        return error
    given = f"rank 0 has returned from train, and rank {failure.rank} waits for it"
    return NanoWorkerError(problem(given, _SAME_STEPS, _ADVICE), rank=failure.rank, traceback=failure.traceback)
