"""How a rank can fail, which of several failures is the cause, and the error that is raised for it."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

import cloudpickle

from nano_loop.distributed.comm.system_limits import limit_in_words
from nano_loop.errors import NanoWorkerError, RankLateError, RankLeftError, error_message

_RUNS_TOGETHER = "a run needs all of its ranks"
_LARGEST = 16 << 20  # bytes of an exception that is sent; of a larger one only the words are
_LONGEST_WORDS = 10_000  # characters of an exception's message
_LONGEST_TRACEBACK = 100_000
# What the system sends to a process for what that has done itself.
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGSTKFLT")
_NO_THREAD = "can't start new thread"  # as Python says it
_MORE_PROCESSES = "Allow more processes (ulimit -u, or the container's limit), or lower num_processes"


class Kind(IntEnum):
    """How near a failure is to the cause; of several, the smallest is reported."""

    CAUSE = 0  # an exception of the loop, a signal, an exit
    LATE = 1  # another rank did not come within the timeout
    LEFT = 2  # another rank has left the run
    ECHO = 3  # a connection to another rank broke


@dataclass
class Failure:
    """A rank that failed.

    Parameters
    ----------
    rank : int
        Which.
    kind : Kind
        How near it is to the cause.
    what : str
        What happened to it, such as ``raised ValueError: bad batch``.
    advice : str
        What to do next.
    exitcode : int or None
        The exit code of its process, negative for a signal.
    traceback : str or None
        Its formatted traceback.
    pickled : bytes
        What it raised, pickled; empty where that could not be sent.
    late : int or None
        The rank that it has waited for in vain; None where it does not know which, or failed otherwise.
    """

    rank: int
    kind: Kind
    what: str
    advice: str
    exitcode: int | None = None
    traceback: str | None = None
    pickled: bytes = b""
    late: int | None = None

    def as_error(self) -> NanoWorkerError:
        """Return the error to raise for it, with the rank's own exception as its cause."""
        message = error_message(f"rank {self.rank} {self.what}", _RUNS_TOGETHER, self.advice)
        if self.kind in (Kind.LATE, Kind.LEFT):
            message = self.what  # which says where it was: its traceback leads through nano_loop
        if self.traceback and self.kind is not Kind.LEFT:
            message += f"\n\nrank {self.rank}:\n{self.traceback.rstrip()}"
        error = NanoWorkerError(message, rank=self.rank, exitcode=self.exitcode, traceback=self.traceback)
        error.__cause__ = _unpickled(self.pickled) if self.pickled and self.kind is not Kind.LEFT else None
        return error


def kind_of(error: BaseException) -> Kind:
    """Return whether an exception is a cause, or the consequence of another rank's end.

    A connection that torch.distributed has lost is a consequence; one of the user's own, to a database or a closed
    terminal, is a cause, in the same words.
    """
    if isinstance(error, RankLeftError):
        return Kind.LEFT
    if isinstance(error, RankLateError):
        return Kind.LATE
    if isinstance(error, RuntimeError) and _raised_by_torch_distributed(error.__traceback__):
        return Kind.ECHO
    return Kind.CAUSE


def _raised_by_torch_distributed(traceback: TracebackType | None) -> bool:
    module = ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    # `Ranks.finish` waits for what torch.distributed has begun.
    return module.startswith("torch.distributed.") or module == "nano_loop.distributed.comm.ranks"


def raised(rank: int, error: BaseException, traceback: str, where: str = "") -> Failure:
    """Return the failure of a rank that raised; `where` is ``" in worker_init"`` if the loop did not."""
    if isinstance(error, RankLateError):
        return Failure(rank, Kind.LATE, str(error), "", traceback=_shortened(traceback), late=error.rank)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        what = f"called sys.exit({'' if error.code is None else repr(error.code)}){where}"
        advice = f"Return from {'worker_init' if where else 'the loop on every rank'} instead"
        return Failure(rank, Kind.CAUSE, what, advice, exitcode=code, traceback=traceback)
    if isinstance(error, RankLeftError):
        return Failure(rank, Kind.LEFT, str(error), "", traceback=_shortened(traceback))
    words = _words_of(error)
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    what = "raised " + text.rstrip(".").partition("\n")[0] + where
    advice = _limit(error) or "Fix the error in its traceback"
    return Failure(rank, kind_of(error), what, advice, traceback=_shortened(traceback))


def _limit(error: BaseException) -> str | None:
    """Return what to do about a limit of the system that an error is for; None for another error."""
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return _MORE_PROCESSES
    if isinstance(error, OSError) and isinstance(error.filename, str):
        with contextlib.suppress(OSError):  # the folder may be gone
            words = limit_in_words(error, Path(error.filename).parent)
            return f"{words[1]}: {words[0]}" if words else None
    return None


def pickled(error: BaseException) -> bytes:
    """Return an exception pickled; empty where it cannot be, or is too large to send."""
    try:
        content = cloudpickle.dumps(error)
    except Exception:  # nothing is known of what a user's exception does when it is pickled
        return b""
    return content if len(content) <= _LARGEST else b""


def flush_output() -> None:
    """Write out what standard output and standard error hold back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the loop may have closed it, or put its own object there
            stream.flush()


def _words_of(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_WORDS]
    except Exception as another:  # a user's __str__ may raise anything
        return f"(its message raises {type(another).__name__})"


def _shortened(traceback: str) -> str:
    """Leave the middle out of a traceback that a message of many megabytes has made long."""
    half = _LONGEST_TRACEBACK // 2
    return traceback if len(traceback) <= 2 * half else f"{traceback[:half]}\n[...]\n{traceback[-half:]}"


def _unpickled(content: bytes) -> BaseException | None:
    """Return a worker's exception; None where it does not come back as one."""
    try:
        error = pickle.loads(content)
    except Exception:  # what a user's class does when it is unpickled is anything; its words are known
        return None
    return error if isinstance(error, BaseException) else None


def died(rank: int, exitcode: int | None = None, last_words: str = "") -> Failure:
    """Return the failure of a rank whose process ended without a report.

    Parameters
    ----------
    rank : int
        Which.
    exitcode : int or None
        Negative for a signal; None where the launcher does not know it.
    last_words : str
        The end of what it wrote to standard error.
    """
    advice = "See what it wrote before" if last_words else "Run the loop with num_processes=1 to find the cause"
    if exitcode is None or exitcode >= 0:
        code = "" if exitcode is None else f" with exit code {exitcode}"
        return Failure(rank, Kind.CAUSE, f"ended its process{code}", advice, exitcode, last_words or None)
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
    what = f"crashed with {name}" if name in _CRASHES else f"was ended by {name}"
    if name == "SIGKILL":
        what = "was killed by SIGKILL"
        advice = "The kernel does that when memory runs out: see dmesg, lower the batch size or num_processes"
    elif name not in _CRASHES and not last_words:
        advice = "Find out what sends it: a job scheduler, a time limit (ulimit -t) or another program"
    return Failure(rank, Kind.CAUSE, what, advice, exitcode, last_words or None)


def first(failures: list[Failure]) -> Failure | None:
    """Return the failure to report, of failures in their order of arrival: the first of the most causal kind."""
    return min(failures, key=lambda failure: failure.kind, default=None)
