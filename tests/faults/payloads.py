"""Faults: arguments that cannot be sent or loaded."""

import importlib
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

from faults.fault import Fault
from faults.runs import OPTIONS, Arriving, raising, with_argument
from nano_loop import TorchNano


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
    """Return a function that sends an instance of a class whose module has changed on disk since its import."""

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


def _edited(file, module):
    file.write_text(_SOURCE.format("raise ValueError(state)"))


FAULTS = [
    Fault("an argument cannot be pickled", with_argument(threading.Lock()), quick=True),
    Fault("an attribute of the loop cannot be pickled", _attribute),
    Fault("the pickling of an argument raises", with_argument(Reluctant())),
    Fault("the pickling of an argument never ends", with_argument(Endless())),
    Fault(
        "an argument raises when it is unpickled",
        with_argument(Arriving(raising(ImportError, "no module for it here"))),
        quick=True,
    ),
    Fault("an argument ends the worker when it is unpickled", with_argument(Arriving(lambda: os._exit(8)))),
    Fault(
        "an argument kills the worker when it is unpickled", with_argument(Arriving(lambda: os.kill(os.getpid(), 11)))
    ),
    Fault(
        "an argument takes longer to be unpickled than the timeout",
        with_argument(Arriving(lambda: time.sleep(30)), timeout=2),
    ),
    Fault("a module of an argument has vanished", _after_import(lambda file, module: file.unlink()), begins=True),
    Fault("a module of an argument was edited since its import", _after_import(_edited), begins=True),
    Fault("worker_init raises", with_argument(None, worker_init=raising(LookupError, "no such library"))),
    Fault("worker_init calls sys.exit(3)", with_argument(None, worker_init=lambda: sys.exit(3))),
    Fault("worker_init cannot be pickled", with_argument(None, worker_init=partial(print, threading.Lock()))),
]
