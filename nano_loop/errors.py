"""The errors and the warning that nano_loop raises, and the three-part sentence they are written in."""

from __future__ import annotations

import reprlib
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


class NanoError(RuntimeError):
    """Something went wrong that is not a single argument's fault; the base of all errors of nano_loop."""


class NanoConfigError(NanoError, ValueError):
    """One or more arguments cannot be used. All of them are named, each with what is allowed and what to do."""


class NanoWorkerError(NanoError):
    """A rank failed.

    Parameters
    ----------
    message : str
        What happened, for a person.
    rank : int
        The global rank that failed first.
    exitcode : int or None
        Its exit code; negative for a signal, None while it is unknown.
    traceback : str or None
        Its formatted traceback, where it could still send one.
    """

    def __init__(self, message: str, *, rank: int, exitcode: int | None = None, traceback: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback


class NanoWarning(UserWarning):
    """What was asked for is done, and has a consequence that a person should know."""


def problem(given: str, allowed: str, advice: str) -> str:
    """Join the three parts of a message: what was given, what is allowed, what to do next.

    Parameters
    ----------
    given : str
        What was given, as it was typed, such as ``precision='fp8'``.
    allowed : str
        What is allowed or needed, a sentence without its full stop.
    advice : str
        What to do next, a sentence without its full stop.
    """
    return f"{given}: {allowed}. {advice}."


def shown(name: str, value: Any) -> str:
    """Return ``name=value`` as it was typed, shortened; the value's class where its ``repr`` raises."""
    try:
        return f"{name}={_repr.repr(value)}"
    except Exception as error:  # a user's object may raise anything; a huge int raises ValueError
        return f"{name}=<{type(value).__name__}, whose repr raises {type(error).__name__}>"
