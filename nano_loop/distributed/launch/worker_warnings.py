"""Warnings of workers: rank 0 shows them when a worker has ended, except for those that it has given itself.

All ranks run the same code, so most warnings of a worker are those of rank 0 over again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from nano_loop.patching.attributes import replaced

_MOST = 10_000  # warnings that are remembered


WarningKey = tuple[str, str, str, int]  # its class, its message, the file that it is about, and the line there

_shown: set[WarningKey] = set()  # by this process, in this run and in those before


def _warning_key(message: Any, category: type[Warning], filename: str, lineno: int) -> WarningKey:
    return f"{category.__module__}.{category.__qualname__}", str(message), filename, lineno


def noted() -> AbstractContextManager[None]:
    """Note the warnings that are shown in the body, in all threads of this process."""
    return replaced(warnings, "showwarning", _noting)


def _noting(show: Callable[..., None]) -> Callable[..., None]:
    def showwarning(message: Any, category: type[Warning], filename: str, lineno: int, *where: Any) -> None:
        if len(_shown) < _MOST:
            _shown.add(_warning_key(message, category, filename, lineno))
        show(message, category, filename, lineno, *where)

    return showwarning


def sent(report: Callable[..., object]) -> None:
    """Send this process's warnings to rank 0 from now on, by `Reporter.report`, instead of showing them."""
    show, owner = warnings.showwarning, os.getpid()

    def showwarning(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if file is not None or os.getpid() != owner:  # a process that this one has forked
            show(message, category, filename, lineno, file, line)
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        report("warning", warned=_warning_key(message, category, filename, lineno), shown=text)

    warnings.showwarning = showwarning


class Awaiting:
    """The warnings of one worker, until it has ended and it is known which of them rank 0 has given itself."""

    def __init__(self) -> None:
        self._texts: dict[WarningKey, str] = {}

    def take(self, report: dict[str, Any]) -> None:
        """Take a report that `sent` has sent."""
        if len(self._texts) < _MOST:
            self._texts.setdefault(tuple(report["warned"]), report["shown"])

    def show(self, say: Callable[[str], None]) -> None:
        """Say those that rank 0 has not given, once each."""
        for key, text in self._texts.items():
            if key not in _shown:
                say(text)
        self._texts.clear()
