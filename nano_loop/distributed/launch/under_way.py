"""Which runs are under way in this process: how they nest in a thread, and which of them has the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nano_loop.errors import NanoError, problem


class _RunsOfThread(threading.local):
    """How many ranks each run has that is under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.sizes: list[int] = []


class _Holder:
    """A run that has the whole process, and the thread that it is in."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.thread = threading.current_thread()


_runs = _RunsOfThread()
_holders: list[_Holder] = []  # all in one thread, the innermost last
_choosing = threading.Lock()


def innermost_size() -> int | None:
    """Return how many ranks the innermost run of this thread has; None outside of all runs."""
    return _runs.sizes[-1] if _runs.sizes else None


@contextmanager
def under_way(size: int) -> Iterator[None]:
    """Note that a run of so many ranks is under way in this thread."""
    _runs.sizes.append(size)
    try:
        yield
    finally:
        _runs.sizes.pop()


@contextmanager
def whole_process(given: str, what: str) -> Iterator[None]:
    """Hold the process group and the CPU binding of all threads for one run; in a thread, runs nest.

    Parameters
    ----------
    given : str
        The option that asks for it, as it was typed, for the message of a run that is refused.
    what : str
        What the run does, for the message of a run that is refused because of this one.

    Raises
    ------
    NanoError
        If a run in another thread has the process.
    """
    mine = _Holder(what)
    try:
        with _choosing:
            if _holders and _holders[-1].thread is not mine.thread:
                raise NanoError(_refusal(given, _holders[-1]))
            _holders.append(mine)
        yield
    finally:
        if mine in _holders:
            _holders.remove(mine)


def _refusal(given: str, holder: _Holder) -> str:
    here = threading.current_thread().name
    taken = f"thread {holder.thread.name!r} is in {holder.what}"
    advice = "Start this run when that one has ended, or in a separate process"
    return problem(f"{given} in thread {here!r}", taken, advice)
