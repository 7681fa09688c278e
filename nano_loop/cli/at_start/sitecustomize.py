"""The module that Python imports before the script of `nano-loop run`: it registers a function for the end, no more.

It imports nothing of nano_loop, since the script may never do so. Before the script begins, the environment and
`sys.path` are those that the script has under ``python``, so processes that it starts do not come here.
"""

import atexit
import os
import sys


def _begin() -> None:
    line, *path = os.environ.pop("_NANO_LOOP_AT_START").split("\n", 1)  # see `nano_loop.cli.at_start`
    if path:
        os.environ["PYTHONPATH"] = path[0]
    else:
        del os.environ["PYTHONPATH"]
    folder = os.path.dirname(__file__)
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)
    atexit.register(_end, os.getpid(), line)  # the first to be registered is the last to be called


def _end(process: int, line: str) -> None:
    """Print the line, unless nano_loop may have been used here or in a child, or the script has failed."""
    times = os.times()
    is_alone = os.getpid() == process and times.children_user + times.children_system == 0  # and not forked itself
    if (
        is_alone
        and "nano_loop.runtime.run" not in sys.modules
        and not hasattr(sys, "last_type")
        and sys.__stderr__ is not None
    ):
        print(line, file=sys.__stderr__)


def _real() -> None:
    """Import the one that this one hides; that there is none is the ImportError that Python expects then."""
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")


if __name__ == "sitecustomize":
    _begin()
    _real()
