"""Ctrl-C while rank 0 waits inside torch, where Python does not hear it: the wait is ended from another thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_PATIENCE = 2.0  # seconds that Python has to hear of a signal by itself
_END = b"\0"  # no signal has this number


@contextmanager
def unheard_interrupts(act: Callable[[], None]) -> Iterator[None]:
    """Call `act`, in a thread, when an interrupt has come and the main thread does not get to its handler.

    A handler runs between two bytecodes of the main thread, so never while that waits for a collective in C++. What
    the handler does stays the user's. Outside the main thread, and where somebody else has a wake-up descriptor (as
    asyncio and notebooks have), this does nothing.

    Parameters
    ----------
    act : callable
        Ends what the main thread waits for.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard = threading.Event()

    def hear(number: int, frame: FrameType | None) -> Any:
        heard.set()
        return handler(number, frame)

    with ExitStack() as stack:
        if _watch(stack, heard, act):
            stack.callback(signal.signal, signal.SIGINT, handler)
            signal.signal(signal.SIGINT, hear)
        yield


def _watch(stack: ExitStack, heard: threading.Event, act: Callable[[], None]) -> bool:
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
    stack.callback(heard.set)
    stack.callback(signal.set_wakeup_fd, -1)
    thread.start()
    return True


def _listen(reading: int, heard: threading.Event, act: Callable[[], None]) -> None:
    while 0 not in (signals := os.read(reading, 64)):
        if signal.SIGINT in signals:
            if not heard.wait(_PATIENCE):
                act()
            heard.clear()
