"""Warnings of workers: rank 0 shows them, except for those that it gives itself.

All ranks run the same code, so most warnings of a worker are those of rank 0 over again.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from nano_loop.intercept.attributes import replaced

_PATIENCE = 10.0  # seconds that a worker's warning waits for rank 0 to get to the same place
_MOST = 10_000  # warnings that are remembered


class Warned(NamedTuple):
    """One warning, as it is compared.

    Attributes
    ----------
    category, text, file : str
        Its class, its message and the file that it is about.
    line : int
        The line in that file.
    """

    category: str
    text: str
    file: str
    line: int


_given: dict[Warned, None] = {}  # by this process, in this run and in those before


def _warned(message: Any, category: type[Warning], filename: str, lineno: int) -> Warned:
    return Warned(f"{category.__module__}.{category.__qualname__}", str(message), filename, lineno)


def noted() -> AbstractContextManager[None]:
    """Note the warnings that are shown in the body, in all threads of this process."""
    return replaced(warnings, "showwarning", _noting)


def _noting(show: Callable[..., None]) -> Callable[..., None]:
    def showwarning(message: Any, category: type[Warning], filename: str, lineno: int, *where: Any) -> None:
        if len(_given) < _MOST:
            _given[_warned(message, category, filename, lineno)] = None
        show(message, category, filename, lineno, *where)

    return showwarning


def sent(send: Callable[[dict[str, Any]], None]) -> None:
    """Send this process's warnings to rank 0 from now on, instead of showing them.

    Parameters
    ----------
    send : callable
        Is given each one, as JSON can hold it.
    """
    show, owner = warnings.showwarning, os.getpid()

    def showwarning(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if file is not None or os.getpid() != owner:  # a process that this one has forked
            show(message, category, filename, lineno, file, line)
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        send({"kind": "warning", "warned": _warned(message, category, filename, lineno), "shown": text})

    warnings.showwarning = showwarning


class Awaiting:
    """The warnings of one worker that rank 0 may still give itself.

    Parameters
    ----------
    show : callable
        Is given the text of each one that rank 0 has not given.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._waiting: list[tuple[float, Warned, str]] = []

    def take(self, report: dict[str, Any]) -> None:
        """Take a report that `sent` has sent."""
        self._waiting.append((time.monotonic(), Warned(*report["warned"]), report["shown"]))

    def show(self, *, all_of_them: bool = False) -> None:
        """Show those that have waited long enough, or all; and drop those that rank 0 has given."""
        still = []
        for since, warned, text in self._waiting:
            if warned in _given:
                continue
            if all_of_them or time.monotonic() > since + _PATIENCE:
                self._show(text)
            else:
                still.append((since, warned, text))
        self._waiting = still
