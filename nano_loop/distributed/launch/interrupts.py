"""Ctrl-C for the length of a launch: held back while something is acquired or given back, and heard in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

from nano_loop.distributed.comm.limits import start_thread

_PATIENCE = 2.0  # seconds that Python has to hear of a signal by itself
_ECHO = 0.5  # seconds in which another interrupt is the same Ctrl-C, pressed twice or sent by another process
_END = b"\0"  # no signal has this number


class Interrupts:
    """Handles SIGINT in the main thread: as the user's handler does, but never between two steps of a launch.

    Python raises a KeyboardInterrupt between any two lines, so also after a process was started and before that is
    registered for its end. So an interrupt is held back, except in the body of `heard`. One that comes while the run is
    cleaned up is raised when that is done; a second one comes through at once.

    In other threads, which are never interrupted, it does nothing.
    """

    def __init__(self) -> None:
        #: Set whenever the handler was called.
        self.called = threading.Event()
        #: When the user's handler was called last.
        self.at = float("-inf")
        self._user: Any = None  # the handler in whose place this one is
        self._before: Any = None
        self._holds = True
        self._held: list[FrameType | None] = []
        self._held_at = float("-inf")

    def __enter__(self) -> Interrupts:
        self.hold()
        self._before = self._user
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.in_place:
            if self._user is signal.default_int_handler:  # which would hear the same Ctrl-C again, in what follows
                time.sleep(max(0.0, _ECHO - self._since_the_last()))
            signal.signal(signal.SIGINT, self._user)
        if self._held and not isinstance(error, KeyboardInterrupt):
            self._user(signal.SIGINT, self._held[0])

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        """Handle one interrupt."""
        self.called.set()
        # Twice would be too often: an exception just where contexts begin to be left would have them not left at all.
        if self._user is signal.default_int_handler and self._since_the_last() < _ECHO:
            return None
        if self._holds:
            again = bool(self._held) and self._since_the_last() > _ECHO
            self._held.append(frame)
            self._held_at = time.monotonic()
            return self._user(number, frame) if again else None
        self.at = time.monotonic()
        return self._user(number, frame)

    def _since_the_last(self) -> float:
        return time.monotonic() - max(self.at, self._held_at)

    @property
    def in_place(self) -> bool:
        """Whether it is the handler; the calls of one that the loop has installed are not known."""
        return signal.getsignal(signal.SIGINT) is self

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
            self.at = time.monotonic()
            self._user(signal.SIGINT, frame)

    @contextmanager
    def noticed(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act`, in a thread, when an interrupt has come and the main thread does not call its handler.

        A handler runs between two bytecodes of the main thread, so never while that waits for a collective in C++.
        Where another library has set a wake-up descriptor (as asyncio and notebooks do), this does nothing.

        Parameters
        ----------
        act : callable
            Ends what the main thread waits for.
        """
        with ExitStack() as stack:
            if self.in_place:
                self._watch(stack, act)
            yield

    def _watch(self, stack: ExitStack, act: Callable[[], None]) -> None:
        """Start the thread that learns of signals from Python's wake-up descriptor, unless that is taken."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        taken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if taken != -1:
            signal.set_wakeup_fd(taken)
            os.close(reading)
            os.close(writing)
            return
        thread = threading.Thread(target=self._listen, args=(reading, act), name="nano_loop interrupts", daemon=True)
        stack.callback(os.close, reading)
        stack.callback(_join, thread)
        stack.callback(os.close, writing)
        # Closing alone would not end the thread: a loader's workers have it open.
        stack.callback(os.write, writing, _END)
        stack.callback(self.called.set)
        stack.callback(signal.set_wakeup_fd, -1)
        start_thread(thread)

    def _listen(self, reading: int, act: Callable[[], None]) -> None:
        while 0 not in (signals := os.read(reading, 64)):
            # A loader's processes have inherited the descriptor, and Ctrl-C is a signal to all.
            is_new = signal.SIGINT in signals and time.monotonic() - self.at > _ECHO
            if is_new and not self.called.wait(_PATIENCE) and self.in_place:
                act()
            self.called.clear()


def _join(thread: threading.Thread) -> None:
    if thread.ident is not None:  # else it could not be started
        thread.join()
