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
    left = {name: [after[name][key] for key in sorted(after[name].keys() - before[name].keys())] for name in after}
    assert not any(left.values()), f"the test left {left}"


def belongings():
    """What this process has at work: of each kind, the things by what tells them apart."""
    gc.collect()  # an exception's frames hold what was at work when it was raised
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("nano_loop")]
    shared_files = [path.name for path in Path("/dev/shm").glob(f"nano_loop-{os.getpid()}-*")]
    descriptors = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    return {
        "processes": dict(_processes()),
        "threads": {name: name for name in threads},
        "shared files": {name: name for name in shared_files},
        "descriptors": {fd: fd for fd in descriptors},
    }


def _processes():
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = "ended, and nobody waited for it"
        except psutil.NoSuchProcess:
            continue
        # torch.compile keeps them, and those of torch 2.8 fork more of them seconds after the test that compiled.
        if "_inductor/compile_worker" not in command:
            yield child.pid, f"{child.pid} {command}"


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
