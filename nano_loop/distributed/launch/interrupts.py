"""Ctrl-C for the length of a launch: held back while something is acquired or given back, and heard in between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_ECHO = 0.5  # seconds in which another interrupt is the same Ctrl-C, pressed twice or sent by another process


class Interrupts:
    """Handles SIGINT in the main thread: as the user's handler does, but never between two steps of a launch.

    Python raises a KeyboardInterrupt between any two lines, so also after a process was started and before that is
    registered for its end. So an interrupt is held back, except in the body of `heard`. One that comes while the run is
    cleaned up is raised when that is done; a second one comes through at once.

    In other threads, which are never interrupted, it does nothing.
    """

    def __init__(self) -> None:
        self._user: Any = None  # the handler in whose place this one is
        self._holds = True
        self._held: list[FrameType | None] = []
        self._at = float("-inf")  # when one came last that was not an echo

    def __enter__(self) -> Interrupts:
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if signal.getsignal(signal.SIGINT) is self:
            if self._user is signal.default_int_handler:  # which would hear the same Ctrl-C again, in what follows
                time.sleep(max(0.0, self._at + _ECHO - time.monotonic()))
            signal.signal(signal.SIGINT, self._user)
        if self._held and not isinstance(error, KeyboardInterrupt):
            self._user(signal.SIGINT, self._held[0])

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        """Handle one interrupt."""
        is_echo = time.monotonic() < self._at + _ECHO
        # Twice would be too often: an exception just where contexts begin to be left would have them not left at all.
        if is_echo and self._user is signal.default_int_handler:
            return None
        self._at = time.monotonic()
        if self._holds:
            self._held.append(frame)
            if is_echo or len(self._held) == 1:
                return None
        return self._user(number, frame)

    def hold(self) -> None:
        """Hold interrupts back from now on, also where the loop has installed another handler."""
        self._holds = True
        present = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(present) and present is not self:
            self._user = present
            signal.signal(signal.SIGINT, self)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let the user's handler be called in the body, and at once where an interrupt was held back."""
        try:
            self._holds = False
            self.hear()
            yield
        finally:
            self._holds = True

    def hear(self) -> None:
        """Call the user's handler now if an interrupt was held back: to be called where a wait can be left."""
        if self._held:
            frame = self._held[0]
            self._held.clear()
            self._at = time.monotonic()
            self._user(signal.SIGINT, frame)
