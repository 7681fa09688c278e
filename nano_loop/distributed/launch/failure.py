"""How a rank can fail, which of several failures is the cause, and the error that is raised for it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import IntEnum

from nano_loop.distributed.ranks import RankLeftError
from nano_loop.errors import NanoWorkerError, problem

_LOST_CONNECTION = re.compile(r"gloo/transport|connection (closed|reset) by peer|broken pipe|connection refused", re.I)
_RUNS_TOGETHER = "a run needs all of its ranks"


class Kind(IntEnum):
    """How near a failure is to the cause; of several, the smallest is reported."""

    CAUSE = 0  # an exception of the loop, a signal, an exit
    LEFT = 1  # another rank has left the run
    ECHO = 2  # a connection to another rank broke


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
    error : BaseException or None
        What it raised, where that could be sent.
    """

    rank: int
    kind: Kind
    what: str
    advice: str
    exitcode: int | None = None
    traceback: str | None = None
    error: BaseException | None = None

    def as_error(self) -> NanoWorkerError:
        """Return the error to raise for it, with the rank's own exception as its cause."""
        message = problem(f"rank {self.rank} {self.what}", _RUNS_TOGETHER, self.advice)
        if self.traceback:
            message += f"\n\nrank {self.rank}:\n{self.traceback.rstrip()}"
        error = NanoWorkerError(message, rank=self.rank, exitcode=self.exitcode, traceback=self.traceback)
        error.__cause__ = self.error
        return error


def kind_of(error: BaseException) -> Kind:
    """Return whether an exception is a cause, or the consequence of another rank's end."""
    if isinstance(error, RankLeftError):
        return Kind.LEFT
    if isinstance(error, (RuntimeError, ConnectionError)) and _LOST_CONNECTION.search(str(error)):
        return Kind.ECHO
    return Kind.CAUSE


def raised(rank: int, error: BaseException, traceback: str) -> Failure:
    """Return the failure of a rank whose loop raised."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        what = f"called sys.exit({'' if error.code is None else repr(error.code)})"
        advice = "Return from the loop on every rank instead"
        return Failure(rank, Kind.CAUSE, what, advice, exitcode=code, traceback=traceback)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    what = "raised " + text.rstrip(".").partition("\n")[0]
    return Failure(rank, kind_of(error), what, "Fix the error in its traceback", traceback=traceback, error=error)


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
    if name == "SIGKILL":
        advice = "The kernel does that when memory runs out: see dmesg, lower the batch size or num_processes"
    what = f"was killed by {name}" if name in ("SIGKILL", "SIGTERM") else f"crashed with {name}"
    return Failure(rank, Kind.CAUSE, what, advice, exitcode, last_words or None)


def first(failures: list[Failure]) -> Failure | None:
    """Return the failure to report, of those in the order in which they came: the earliest that is a cause."""
    return min(failures, key=lambda failure: failure.kind, default=None)
