"""How a rank can fail, which of several failures is the cause, and the error raised for it."""

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
_LARGEST = 16 << 20  # maximum size in bytes of a pickled exception; only the message of a larger one is sent
_LONGEST_WORDS = 10_000  # characters of an exception's message
_LONGEST_TRACEBACK = 100_000
# Signals that the system sends to a process for its own faults.
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGSTKFLT")
_NO_THREAD = "can't start new thread"  # Python's message
_MORE_PROCESSES = "Allow more processes (ulimit -u, or the container's limit), or lower num_processes"


class Kind(IntEnum):
    """The relation of a failure to the cause; of several failures, the one with the smallest value is reported."""

    CAUSE = 0  # an exception of the loop, a signal, or an exit
    LATE = 1  # another rank did not respond within the timeout
    LEFT = 2  # another rank has left the run
    ECHO = 3  # a connection to another rank broke


@dataclass
class Failure:
    """A rank that failed."""

    rank: int
    kind: Kind  # its relation to the cause
    what: str  # a description, such as ``raised ValueError: bad batch``
    advice: str  # the recommended action
    exitcode: int | None = None  # of its process; negative for a signal
    traceback: str | None = None
    pickled: bytes = b""  # its exception; empty if it could not be sent
    #: The rank that it waited for in vain; None if it is unknown or the failure is of another kind.
    late: int | None = None

    def as_error(self) -> NanoWorkerError:
        """Return the error to raise, with the rank's own exception as its cause."""
        message = error_message(f"rank {self.rank} {self.what}", _RUNS_TOGETHER, self.advice)
        if self.kind in (Kind.LATE, Kind.LEFT):
            message = self.what  # it already names the place; the traceback would only show nano_loop
        if self.traceback and self.kind is not Kind.LEFT:
            message += f"\n\nrank {self.rank}:\n{self.traceback.rstrip()}"
        error = NanoWorkerError(message, rank=self.rank, exitcode=self.exitcode, traceback=self.traceback)
        error.__cause__ = _unpickled(self.pickled) if self.pickled and self.kind is not Kind.LEFT else None
        return error


def kind_of(error: BaseException) -> Kind:
    """Return whether an exception is a cause, or a consequence of another rank's end.

    A lost connection of torch.distributed is one; of the user's, to a database, it is a cause with the same message.
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
    # `Ranks.finish` waits for collectives that torch.distributed has started.
    return module.startswith("torch.distributed.") or module == "nano_loop.distributed.comm.ranks"


def raised(rank: int, error: BaseException, traceback: str, where: str = "") -> Failure:
    """Return the failure of a rank that raised; `where` is ``" in worker_init"`` if the loop did not raise."""
    if isinstance(error, RankLateError):
        return Failure(rank, Kind.LATE, str(error), "", traceback=shortened(traceback), late=error.rank)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        what = f"called sys.exit({'' if error.code is None else repr(error.code)}){where}"
        advice = f"Return from {'worker_init' if where else 'the loop on every rank'} instead"
        return Failure(rank, Kind.CAUSE, what, advice, exitcode=code, traceback=traceback)
    if isinstance(error, RankLeftError):
        return Failure(rank, Kind.LEFT, str(error), "", traceback=shortened(traceback))
    words = _words_of(error)
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    what = "raised " + text.rstrip(".").partition("\n")[0] + where
    advice = _limit(error) or "Fix the error in its traceback"
    return Failure(rank, kind_of(error), what, advice, traceback=shortened(traceback))


def _limit(error: BaseException) -> str | None:
    """Return advice about the system limit that caused an error; None for other errors."""
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return _MORE_PROCESSES
    if isinstance(error, OSError) and isinstance(error.filename, str):
        with contextlib.suppress(OSError):  # the folder may be deleted
            words = limit_in_words(error, Path(error.filename).parent)
            return f"{words[1]}: {words[0]}" if words else None
    return None


def pickled(error: BaseException) -> bytes:
    """Return an exception pickled; empty if it cannot be pickled or is too large to send."""
    try:
        content = cloudpickle.dumps(error)
    except Exception:  # pickling a user's exception may raise anything
        return b""
    return content if len(content) <= _LARGEST else b""


def flush_output() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the loop may have closed or replaced it
            stream.flush()


def _words_of(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_WORDS]
    except Exception as another:  # a user's __str__ may raise anything
        return f"(its message raises {type(another).__name__})"


def shortened(text: str, most: int = _LONGEST_TRACEBACK) -> str:
    """Omit the middle of a long text, such as a traceback with a message of many megabytes."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}[...]{text[-half:]}"


def _unpickled(content: bytes) -> BaseException | None:
    """Return a worker's exception; None if it cannot be unpickled as one."""
    try:
        error = pickle.loads(content)
    except Exception:  # a user's class may raise anything; its message is known
        return None
    return error if isinstance(error, BaseException) else None


def died(rank: int, exitcode: int | None = None, last_words: str = "") -> Failure:
    """Return the failure of a rank whose process ended without a report; a negative `exitcode` is a signal."""
    advice = "See its previous output" if last_words else "Run the loop with num_processes=1 to find the cause"
    if exitcode is None or exitcode >= 0:
        code = "" if exitcode is None else f" with exit code {exitcode}"
        return Failure(rank, Kind.CAUSE, f"ended its process{code}", advice, exitcode, last_words or None)
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
    what = f"crashed with {name}" if name in _CRASHES else f"was ended by {name}"
    if name == "SIGKILL":
        what = "was killed by SIGKILL"
        advice = "The kernel does this when memory runs out: see dmesg; lower the batch size or num_processes"
    elif name not in _CRASHES and not last_words:
        advice = "Find out what sends it: a job scheduler, a time limit (ulimit -t) or another program"
    return Failure(rank, Kind.CAUSE, what, advice, exitcode, last_words or None)


def first(failures: list[Failure]) -> Failure | None:
    """Return the failure to report, given failures in order of arrival: the first of the most causal kind."""
    return min(failures, key=lambda failure: failure.kind, default=None)
