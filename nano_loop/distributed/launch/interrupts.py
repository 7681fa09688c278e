"""Ctrl-C while rank 0 waits inside torch, where Python does not notice it, and while a run is cleaned up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_PATIENCE = 2.0  # seconds that Python has to hear of a signal by itself
_ECHO = 0.5  # seconds in which another interrupt is the same Ctrl-C, pressed twice or sent by another process
_END = b"\0"  # no signal has this number


@contextmanager
def unheard_interrupts(act: Callable[[], None]) -> Iterator[None]:
    """Call `act`, in a thread, when an interrupt has come and the main thread does not call its handler.

    A handler runs between two bytecodes of the main thread, so never while that waits for a collective in C++. What
    the handler does stays the user's. Outside the main thread, and where another library has set a wake-up descriptor
    (as asyncio and notebooks do), this does nothing.

    Parameters
    ----------
    act : callable
        Ends what the main thread waits for.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard = _Heard(handler)
    with ExitStack() as stack:
        if _watch(stack, heard, act):
            stack.callback(heard.put_back)
            signal.signal(signal.SIGINT, heard)
        yield


@contextmanager
def undisturbed_ending() -> Iterator[Callable[[], None]]:
    """Delay the first Ctrl-C during the cleaning until everything is cleaned up; a second one comes through.

    Outside the main thread, which alone is interrupted, this does nothing.

    Yields
    ------
    callable
        To be called where the cleaning begins.
    """
    late = _Late()
    try:
        yield late.begin
    finally:
        late.end()
    if late.frames:
        late.handler(signal.SIGINT, late.frames[0])


class _Late:
    """Replaces the user's handler during the cleaning, and holds the first call back."""

    def __init__(self) -> None:
        self.frames: list[FrameType | None] = []
        self.handler: Any = None

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self.frames.append(frame)
        return self.handler(number, frame) if len(self.frames) > 1 else None

    def begin(self) -> None:
        present = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(present):
            self.handler = present.handler if isinstance(present, _Heard) else present
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, self.handler)


class _Heard:
    """Replaces the user's handler, calls it, and notes that it was called."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.called = threading.Event()
        self.at = float("-inf")
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self.called.set()
        # An exception just where contexts begin to be left would have them not left at all.
        if self.handler is signal.default_int_handler and time.monotonic() - self.at < _ECHO:
            return None
        self.at = time.monotonic()
        return self.handler(number, frame)

    @property
    def in_place(self) -> bool:
        """Whether it is still the handler; the calls of one that the loop has installed are not known."""
        return signal.getsignal(signal.SIGINT) is self

    def put_back(self) -> None:
        if self.in_place:
            signal.signal(signal.SIGINT, self.handler)


def _watch(stack: ExitStack, heard: _Heard, act: Callable[[], None]) -> bool:
    """Start the thread that learns of signals from Python's wake-up descriptor, unless that is taken."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    taken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
        os.close(reading)
        os.close(writing)
        return False
    thread = threading.Thread(target=_listen, args=(reading, heard, act), name="nano_loop interrupts", daemon=True)
    stack.callback(os.close, reading)
    stack.callback(thread.join)
    stack.callback(os.close, writing)
    stack.callback(os.write, writing, _END)  # closing alone would not end the thread: a loader's workers have it open
    stack.callback(heard.called.set)
    stack.callback(signal.set_wakeup_fd, -1)
    thread.start()
    return True


def _listen(reading: int, heard: _Heard, act: Callable[[], None]) -> None:
    while 0 not in (signals := os.read(reading, 64)):
        # A loader's processes have inherited the descriptor, and Ctrl-C is a signal to all.
        is_new = signal.SIGINT in signals and time.monotonic() - heard.at > _ECHO
        if is_new and not heard.called.wait(_PATIENCE) and heard.in_place:
            act()
        heard.called.clear()
