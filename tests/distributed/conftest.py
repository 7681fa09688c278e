"""A watch over what a run of several ranks leaves."""

import gc
import os
import threading
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def nothing_left():
    """Fail a test after which there are more processes, threads, descriptors or shared files than before."""
    before = belongings()
    yield
    after = belongings()
    left = {name: sorted(after[name] - before[name]) for name in after if after[name] - before[name]}
    assert not left, f"the test left {left}"


def belongings():
    gc.collect()  # an exception's frames hold what was at work when it was raised
    return {
        "processes": {child.pid for child in psutil.Process().children(recursive=True)},
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("nano_loop")},
        "shared files": {path.name for path in Path("/dev/shm").glob(f"nano_loop-{os.getpid()}-*")},
        "descriptors": {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)},
    }


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
