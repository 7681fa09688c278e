"""How the ranks of a run end together if one of them fails, and the error that rank 0 then raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from nano_loop.distributed.comm.ranks import Loop
from nano_loop.distributed.launch.failure import Kind, kind_of, raised
from nano_loop.distributed.launch.workers import Workers
from nano_loop.errors import NanoWorkerError, RankLeftError, error_message

Joined = TypeVar("Joined")

_ECHO_WAITS = 3.0  # seconds to wait for another rank's report if an error was caused by that rank


@contextmanager
def running_together(
    workers: Workers,
    connect: Callable[[Callable[[], None]], AbstractContextManager[Joined]],
    timeout: float,
    loop: Loop = Loop(),  # noqa: B008 - it is frozen
    *,
    forget: Callable[[], object] = lambda: None,
) -> Iterator[Joined]:
    """Run the body as rank 0 alongside `workers` until all have finished or one has failed, then end them.

    Raises a `NanoWorkerError` if another rank fails. Interrupts are handled in the body, and in the waits before and
    after it. `forget` deletes the payload when all have read it. `connect` gets a function that raises if another rank
    failed.
    """
    has_joined, interrupts = False, workers.interrupts

    def check() -> None:
        if not has_joined:
            interrupts.hear()
        workers.check()

    with ExitStack() as stack:
        stack.callback(workers.end)
        with interrupts.heard():
            workers.wait_until_ready(timeout)
        forget()  # free the memory as early as possible
        stack.callback(interrupts.hold)
        with ending_together(workers, timeout, loop), connect(check) as joined, interrupts.heard():
            has_joined = True
            yield joined
        workers.leave()
        with ending_together(workers, timeout, loop, has_returned=True), interrupts.heard():
            workers.wait_until_finished(timeout)


@contextmanager
def ending_together(workers: Workers, timeout: float, loop: Loop, *, has_returned: bool = False) -> Iterator[None]:
    """Kill the workers if rank 0 raises, and raise the first error, rather than its consequences on rank 0."""
    try:
        yield
    except BaseException as error:
        cause = _cause_of(error, workers, timeout, loop, has_returned)
        workers.kill()
        if cause is error:
            raise
        is_echo = has_returned or kind_of(error) > Kind.LATE
        raise cause from cause.__cause__ or (None if is_echo else error)


def _cause_of(error: BaseException, workers: Workers, timeout: float, loop: Loop, has_returned: bool) -> BaseException:
    """Return the error to raise for an exception of rank 0: itself, or the failure of another rank."""
    if has_returned:
        return _left_behind(error, workers, loop)
    kind = kind_of(error)
    if kind is Kind.CAUSE:
        return error
    is_late, left = kind is Kind.LATE, error.rank if isinstance(error, RankLeftError) else None
    workers.leave(raised(0, error, "".join(traceback.format_exception(error))) if is_late else None)
    patience = max(_ECHO_WAITS, workers.latest_news) + (0 if kind is Kind.ECHO else timeout)
    failure = workers.await_failure(patience, of=left)  # a rank with a long message needs time to report why it left
    if failure is not None and failure.kind <= Kind.LATE:
        return failure.as_error()
    if left is not None:
        return NanoWorkerError(str(error), rank=left)
    for rank in workers.finished:
        return _returned(rank, 0, loop)
    return failure.as_error() if failure is not None else error


def _returned(rank: int, waiting: int, loop: Loop) -> NanoWorkerError:
    got = f"rank {rank} has returned from {loop.name}, and rank {waiting} waits for it"
    return NanoWorkerError(error_message(got, *loop.same_steps), rank=rank)


def _left_behind(error: BaseException, workers: Workers, loop: Loop) -> BaseException:
    """Return the error for a worker that lost its connection because rank 0 has returned from the loop."""
    failure = workers.await_failure(0)
    if failure is None or failure.kind <= Kind.LATE:
        return error
    if failure.kind is Kind.LEFT:
        return failure.as_error()
    returned = _returned(0, failure.rank, loop)
    return NanoWorkerError(str(returned), rank=failure.rank, traceback=failure.traceback)
