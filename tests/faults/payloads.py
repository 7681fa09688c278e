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


_SOURCE = """
class Thing:
    def __getstate__(self):
        return {{"size": 1}}

    def __setstate__(self, state):
        {0}
"""


def _after_import(change):
    """Return what sends an instance of a class whose module has changed on disk since its import."""

    def commit():
        folder = Path(os.environ["TMPDIR"])
        file = folder / "module_that_changes.py"
        file.write_text(_SOURCE.format("vars(self).update(state)"))
        sys.path.insert(0, str(folder))
        try:
            module = importlib.import_module("module_that_changes")
            change(file, module)
            with_argument(module.Thing())()
        finally:
            sys.path.remove(str(folder))
            sys.modules.pop("module_that_changes", None)

    return commit


def _ending(file, module):
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(8)\n{_SOURCE.format('pass')}")
    importlib.reload(module)


def _edited(file, module):
    file.write_text(_SOURCE.format("raise ValueError(state)"))


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
        quick=True,
    ),
    Fault(
        "an argument ends the worker where it is unpickled",
        STARTING,
        with_argument(Arriving(lambda: os._exit(8))),
        words=("rank 1 ended its process with exit code 8",),
    ),
    Fault(
        "an argument kills the worker where it is unpickled",
        STARTING,
        with_argument(Arriving(lambda: os.kill(os.getpid(), 11))),
        words=("rank 1 crashed with SIGSEGV",),
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
        _after_import(lambda file, module: file.unlink()),
        words=("rank 1 raised ModuleNotFoundError: No module named 'module_that_changes'",),
        begins=True,
    ),
    Fault(
        "a module of an argument ends its process where it is imported",
        STARTING,
        _after_import(_ending),
        words=("rank 1 ended its process with exit code 8",),
        begins=True,
    ),
    Fault(
        "a module of an argument was edited since its import",
        STARTING,
        _after_import(_edited),
        words=("module_that_changes.py has changed since it was imported", "Restart the program"),
        rank=0,
        begins=True,
    ),
]
