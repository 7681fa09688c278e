"""Ctrl-C during a launch: deferred while resources are acquired or released, and handled in between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_ECHO = 0.5  # seconds within which another interrupt is treated as the same Ctrl-C, repeated or sent by another process


class Interrupts:
    """Handles SIGINT in the main thread like the user's handler, but never between two steps of a launch.

    Python raises a KeyboardInterrupt between any two lines, including after a process was started and before its
    cleanup is registered. So interrupts are deferred, except in the body of `heard`. A second one during the cleanup
    takes effect immediately.
    """

    def __init__(self) -> None:
        self._user: Any = None  # the handler that this one replaces
        self._holds = True
        self._held: list[FrameType | None] = []
        self._at = float("-inf")  # time of the last interrupt that was not an echo

    def __enter__(self) -> Interrupts:
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if signal.getsignal(signal.SIGINT) is self:
            if self._user is signal.default_int_handler:  # it would handle the same Ctrl-C again later
                time.sleep(max(0.0, self._at + _ECHO - time.monotonic()))
            signal.signal(signal.SIGINT, self._user)
        if self._held and not isinstance(error, KeyboardInterrupt):
            self._user(signal.SIGINT, self._held[0])

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        """Handle one interrupt."""
        is_echo = time.monotonic() < self._at + _ECHO
        # Raising twice could interrupt the start of the cleanup, and contexts would not be exited at all.
        if is_echo and self._user is signal.default_int_handler:
            return None
        self._at = time.monotonic()
        if self._holds:
            self._held.append(frame)
            if is_echo or len(self._held) == 1:
                return None
        return self._user(number, frame)

    def hold(self) -> None:
        """Defer interrupts from now on, even if the loop has installed another handler."""
        self._holds = True
        present = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(present) and present is not self:
            self._user = present
            signal.signal(signal.SIGINT, self)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let the user's handler be called in the body, and immediately if an interrupt was deferred."""
        try:
            self._holds = False
            self.hear()
            yield
        finally:
            self._holds = True

    def hear(self) -> None:
        """Call the user's handler now if an interrupt was deferred. Call this where a wait can be aborted."""
        if self._held:
            frame = self._held[0]
            self._held.clear()
            self._at = time.monotonic()
            self._user(signal.SIGINT, frame)
