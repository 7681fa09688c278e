"""Check that a run of several ranks leaves nothing behind."""

import gc
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from nano_loop.distributed.launch import active_runs
from nano_loop.distributed.launch_local import server as servers

#: Seconds for which things may outlive a test: a loader's queue leaves its pipe to a thread that closes it.
_PATIENCE = 2


@pytest.fixture
def nothing_left():
    """Fail a test after which there are more processes, threads, descriptors, folders or runs than before."""
    before = belongings()
    gc.freeze()  # # keep gc.collect() from traversing everything that earlier tests imported
    yield
    end = time.monotonic() + _PATIENCE
    while any((left := _more_than(before)).values()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(left.values()), f"the test left {left}"


def _more_than(before):
    after = belongings()
    return {name: [after[name][key] for key in sorted(after[name].keys() - before[name].keys())] for name in after}


def belongings():
    """Return the resources of this process: by kind, each resource under its identity."""
    gc.collect()  # a live exception keeps the resources in its frames alive
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("nano_loop")]
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    folders = [str(path) for place in places for path in place.glob(f"nano_loop-{os.getpid()}-*")]
    sources = [source for server in servers.kept for source in server.sources]
    kept = {source if isinstance(source, int) else source.fileno() for source in sources}
    descriptors = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd) and fd not in kept]
    return {
        "processes": dict(_processes()),
        "threads": {name: name for name in threads},
        "folders": {name: name for name in folders},
        "descriptors": {fd: fd for fd in descriptors},
        "runs": {what: what for what in runs_that_have_the_process()},
    }


def runs_that_have_the_process():
    """Return the descriptions of the runs that keep runs in other threads from starting."""
    return [holder.what for holder in active_runs._holders]


def _processes():
    # Workers are forked by the kept server process, which is not a child of this process.
    roots = (os.getpid(), *(server.pid for server in servers.kept))
    for child in [child for root in roots for child in _below(root)]:
        try:
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = "ended, and nobody waited for it"
        except psutil.NoSuchProcess:
            continue
        # torch.compile keeps these processes; torch 2.8 forks more of them seconds after the test that compiled.
        if "_inductor/compile_worker" not in command:
            yield child.pid, f"{child.pid} {command}"


def _below(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:  # the kept process exits after an idle minute
        return []


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
