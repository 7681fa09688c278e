"""The errors and warnings of nano_loop, and the three-part format of their messages."""

from __future__ import annotations

import reprlib
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_LONGEST = 2000  # maximum characters of a part of a message that is not only a quoted value


class NanoError(RuntimeError):
    """Base class of all errors of nano_loop. Raised directly for failures that are not caused by one argument."""


class NanoConfigError(NanoError, ValueError):
    """One or more arguments are invalid. The message lists each one, its allowed values and what to do."""


class NanoMemoryError(NanoError, MemoryError):
    """A training run needs more memory than it may use. The message lists the largest tensors and what to change."""


class NanoWorkerError(NanoError):
    """A rank failed.

    Parameters
    ----------
    message : str
        The error message.
    rank : int
        The global rank that failed first.
    exitcode : int or None
        Its exit code. Negative for a signal, None if unknown.
    traceback : str or None
        Its formatted traceback. None if the rank could not send one.
    """

    def __init__(self, message: str, *, rank: int, exitcode: int | None = None, traceback: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, an exception is pickled and copied by its positional arguments only.
        attributes = {name: value for name, value in vars(self).items() if name not in _OF_WORKER_ERRORS}
        return _worker_error, (type(self), str(self), *(getattr(self, name) for name in _OF_WORKER_ERRORS)), attributes


_OF_WORKER_ERRORS = ("rank", "exitcode", "traceback")


def _worker_error(
    kind: type[NanoWorkerError], message: str, rank: int, exitcode: int | None, traceback: str | None
) -> NanoWorkerError:
    return kind(message, rank=rank, exitcode=exitcode, traceback=traceback)


class _RankError(NanoError):
    """Another rank did not reach the point where this rank waits for it: `rank`, or None if it may be any of them."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class RankLateError(_RankError):
    """Another rank did not reach the point where this rank waits for it within the timeout.

    `nano_loop.distributed.shared_memory.shared_segment` raises it on one host, otherwise `Ranks` or the rendezvous.
    """


class RankLeftError(_RankError):
    """Another rank has left the run: it returned from the loop, or it failed and reports that itself."""

    rank: int


class NanoWarning(UserWarning):
    """The request is carried out, but with a consequence that the user should know about."""


def error_message(got: str, expected: str, hint: str) -> str:
    """Join the three parts of a message: what was given, what is allowed, and what to do.

    Parameters
    ----------
    got : str
        The input, as the user wrote it, such as ``precision='fp8'``.
    expected : str
        What is allowed or required, as a sentence without a full stop.
    hint : str
        What to do next, as a sentence without a full stop.
    """
    return f"{quoted(got, _LONGEST // 2)}: {quoted(expected, _LONGEST)}. {quoted(hint, _LONGEST)}."


def quoted(text: str, most: int = _repr.maxstring) -> str:
    """Return a text for a message, with control characters escaped, and shortened in the middle if it is long."""
    half = most // 2
    short = text if len(text) <= most else f"{text[: half - 2]}...{text[1 - half :]}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in short)


def shown(name: str, value: Any) -> str:
    """Return ``name=value`` with a shortened ``repr``, or with the class name if ``repr`` raises."""
    try:
        return quoted(f"{name}={_repr.repr(value)}", _LONGEST)
    except Exception as error:  # a user's object may raise any exception; a huge int raises ValueError
        return f"{name}=<{type(value).__name__}, whose repr raises {type(error).__name__}>"
