"""The settings that actors copy from the caller's process, and undoing Ray's changes to that process."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nano_loop.config.environment import KERNELS
from nano_loop.distributed.files.folder import working_folder
from nano_loop.distributed.launch_external.environment import NAMES, PREFIXES
from nano_loop.distributed.launch_local.start import NOT_FOR_WORKERS

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by users to choose the number of compute threads


def for_actors(cpus: int, *, folder_is_shipped: bool) -> dict[str, Any]:
    """Return the settings that actors with this number of CPUs apply before they import torch."""
    users = _from_environment(*_THREADS)
    return {
        "argv": [*map(str, sys.argv)],
        "path": [os.path.abspath(entry) for entry in sys.path],
        "cwd": None if folder_is_shipped else working_folder(),
        "threads_are_chosen": bool(users),
        # The variables of other launchers, and those that bind threads.
        "without": (*PREFIXES, *NAMES, *NOT_FOR_WORKERS),
        "environ": {
            _THREADS[0]: str(cpus),
            "TQDM_DISABLE": "1",
            "PYTHONBREAKPOINT": "0",
            **users,
            **_from_environment(KERNELS),
        },
    }


def _from_environment(*names: str) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


@contextmanager
def changes_undone_by(stack: ExitStack) -> Iterator[None]:
    """Make `stack` undo the body's changes of variables, SIGTERM's handler, the exception hook and fault reports."""
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
    """Restore a variable, unless it has been changed since."""
    if os.environ.get(name) != made:
        return
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


def _put_back_handler(handler: Callable[..., object] | int | None) -> None:
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
