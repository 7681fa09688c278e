"""Python imports this before the script of `nano-loop run`. It leaves a function for the end, and no other trace.

It imports nothing of nano_loop, since the script may never do so. Before the script begins, the environment and
`sys.path` are those that the script has under ``python``, so processes that it starts do not come here.
"""

import atexit
import os
import sys


def _begin() -> None:
    process, mark, line, *path = os.environ["NANO_LOOP_RUN"].split("\n", 3)  # see `nano_loop.run_note`
    if path:
        os.environ["PYTHONPATH"] = path[0]
    else:
        del os.environ["PYTHONPATH"]
    folder = os.path.dirname(__file__)
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)
    if process == str(os.getpid()):
        atexit.register(_end, os.getpid(), mark, line)  # the first to be registered is the last to be called


def _end(process: int, mark: str, line: str) -> None:
    """Print the line, unless a run has begun here or in a process of the script's, or the script has failed."""
    if os.getpid() != process:  # forked by the script
        return
    begun = getattr(sys.modules.get("nano_loop.run_note"), "begun", False)
    if os.path.exists(mark):
        begun = True
        os.unlink(mark)
    if not begun and not hasattr(sys, "last_type") and sys.__stderr__ is not None:
        print(line, file=sys.__stderr__)


def _real() -> None:
    """Import the one that this one hides; that there is none is the ImportError that Python expects then."""
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")


if __name__ == "sitecustomize":
    _begin()
    _real()
