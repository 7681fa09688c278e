"""What Ray changes in the caller's process when it is imported and initialized, put back when the run ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def changes_undone_by(stack: ExitStack) -> Iterator[None]:
    """Have `stack` undo what the body changes: variables, SIGTERM's handler, the hook of exceptions, fault reports."""
    environ, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    hook, reports = sys.excepthook, faulthandler.is_enabled()
    try:
        yield
    finally:
        for name in {name for name, _ in os.environ.items() ^ environ.items()}:
            stack.callback(_put_back_variable, name, os.environ.get(name), environ.get(name))
        if sys.excepthook is not hook:
            stack.callback(setattr, sys, "excepthook", hook)
        if signal.getsignal(signal.SIGTERM) is not handler:
            stack.callback(_put_back_handler, handler)
        if faulthandler.is_enabled() and not reports:
            stack.callback(faulthandler.disable)


def _put_back_variable(name: str, made: str | None, before: str | None) -> None:
    """Put a variable back, unless somebody has changed it since."""
    if os.environ.get(name) != made:
        return
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


def _put_back_handler(handler: Any) -> None:
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
