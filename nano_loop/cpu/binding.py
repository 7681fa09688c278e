"""The temporary binding of this process's threads to a set of CPUs, with each thread's affinity mask restored.

An affinity mask belongs to a thread. ``os.sched_setaffinity(0, ...)`` binds only the calling thread, and existing
OpenMP threads keep their masks. So every thread that the kernel lists is bound.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_loop.cpu.tree import format_cpu_list
from nano_loop.errors import NanoError, error_message

_TASKS = Path("/proc/self/task")

# The first round finds the existing threads, and the second one those that unbound threads have started in between.
# More rounds are rare. The limit ends the loop in a process that keeps starting threads.
_MOST_ROUNDS = 100


@contextmanager
def bound(cpus: Collection[int]) -> Iterator[None]:
    """Run the body with every thread of this process on `cpus`, the ids of logical CPUs.

    On exit, the mask of each thread is restored, and threads that were started in the body get the previous mask of the
    calling thread. The context has no effect if threads cannot be bound (macOS, no /proc). Raises a `NanoError` if the
    kernel rejects the mask.
    """
    # If /proc belongs to another PID namespace, its ids are those of other processes' threads.
    if not (hasattr(os, "sched_setaffinity") and (_TASKS / str(threading.get_native_id())).is_dir()):
        yield
        return
    own = os.sched_getaffinity(0)
    masks = _masks()
    try:
        _bind(cpus, own)
        yield
    finally:
        _put_back(masks, own)


def _masks() -> dict[int, set[int]]:
    masks = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # the thread has ended
            masks[thread] = os.sched_getaffinity(thread)
    return masks


def _bind(cpus: Collection[int], own: Collection[int]) -> None:
    try:
        for thread in _each_thread():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cpus)
    except OSError as error:
        refused = f"the kernel refused it ({error.strerror}); this thread had CPUs {format_cpu_list(own)}"
        hint = "Check whether the cpuset or the affinity of this process has changed, and restart the run"
        raise NanoError(error_message(f"binding to CPUs {format_cpu_list(cpus)}", refused, hint)) from error


def _put_back(masks: dict[int, set[int]], own: Collection[int]) -> None:
    """Restore the mask of each thread, and set `own` for new threads. Never raises, to keep an error of the body."""
    for thread, mask in masks.items():
        _put_back_one(thread, mask)
    # Last, since it needs a file descriptor, and the body may have failed because none were left.
    with suppress(OSError):
        for thread in _each_thread():
            if thread not in masks:
                _put_back_one(thread, own)


def _put_back_one(thread: int, mask: Collection[int]) -> None:
    # The id of an ended thread may have been reused by another process.
    if (_TASKS / str(thread)).is_dir():
        with suppress(OSError):
            os.sched_setaffinity(thread, mask)


def _each_thread() -> Iterator[int]:
    """Yield the id of each thread once, including threads that are started during the iteration."""
    met: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        born = _threads() - met
        if not born:
            return
        yield from sorted(born)
        met |= born


def _threads() -> set[int]:
    return {int(name) for name in os.listdir(_TASKS)}
