"""Faults: arguments that cannot be sent, or do not arrive."""

import importlib
import os
import sys
import threading
import time
from pathlib import Path

from faults.fault import BEFORE, STARTING, Fault
from faults.runs import OPTIONS, Arriving, raising, with_argument
from nano_loop import NanoWorkerError, TorchNano


def _attribute():
    class Loop(TorchNano):
        def __init__(self):
            super().__init__(**OPTIONS)
            self.guard = threading.Lock()

        def train(self):
            pass

    Loop().train()


class Reluctant:
    def __reduce__(self):
        raise ValueError("not this one")


class Endless:
    def __reduce__(self):
        return Endless, (Endless(),)


def _vanished_module():
    """Send an instance of a class whose module other processes do not find."""
    folder = Path(os.environ["TMPDIR"])
    file = folder / "module_that_vanishes.py"
    file.write_text("class Thing:\n    pass\n")
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("module_that_vanishes")
        file.unlink()
        with_argument(module.Thing())()
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("module_that_vanishes", None)


FAULTS = [
    Fault(
        "an argument cannot be pickled",
        BEFORE,
        with_argument(threading.Lock()),
        NanoWorkerError,
        ("its item 0, is a _thread.lock and cannot be pickled", "Create it inside train"),
        rank=0,
        quick=True,
    ),
    Fault(
        "an attribute of the loop cannot be pickled", BEFORE, _attribute, NanoWorkerError, ("guard", "Create it inside")
    ),
    Fault("the pickling of an argument raises", BEFORE, with_argument(Reluctant()), words=("not this one",), rank=0),
    Fault(
        "the pickling of an argument never ends",
        BEFORE,
        with_argument(Endless()),
        words=("is a faults.payloads.Endless and cannot be pickled", "recursion"),
        rank=0,
    ),
    Fault(
        "an argument raises where it is unpickled",
        STARTING,
        with_argument(Arriving(raising(ImportError, "no module for it here"))),
        words=("rank 1 raised ImportError: no module for it here",),
        rank=1,
        cause=ImportError,
        quick=True,
    ),
    Fault(
        "an argument ends the worker where it is unpickled",
        STARTING,
        with_argument(Arriving(lambda: os._exit(8))),
        words=("rank 1 ended its process with exit code 8",),
        rank=1,
        exitcode=8,
    ),
    Fault(
        "an argument kills the worker where it is unpickled",
        STARTING,
        with_argument(Arriving(lambda: os.kill(os.getpid(), 11))),
        words=("rank 1 crashed with SIGSEGV",),
        rank=1,
        exitcode=-11,
    ),
    Fault(
        "an argument takes longer to be unpickled than the timeout",
        STARTING,
        with_argument(Arriving(lambda: time.sleep(30)), timeout=2),
        words=("rank 1 did not start within 2 s", "pass a longer timeout", "payloads.py"),
        rank=1,
    ),
    Fault(
        "a module of an argument has vanished",
        STARTING,
        _vanished_module,
        words=("rank 1 raised ModuleNotFoundError: No module named 'module_that_vanishes'",),
        rank=1,
        begins=True,
    ),
]
