"""Binds the threads of this process to some CPUs for a while, and puts each thread's own mask back.

A mask belongs to a thread: ``os.sched_setaffinity(0, ...)`` binds the calling thread alone, and the OpenMP threads that
exist already keep theirs. So every thread that the kernel lists is bound.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_loop.cpu.cpu_list import format_cpu_list
from nano_loop.errors import NanoError, problem

_TASKS = Path("/proc/self/task")

# One round finds the threads there are, a second those that were born meanwhile to threads not yet bound. More are
# rare, and a process that never stops bearing threads must not keep us here.
_MOST_ROUNDS = 100


@contextmanager
def bound(cpus: Collection[int]) -> Iterator[None]:
    """Run the body with every thread of this process on `cpus`.

    On leaving, each thread gets its own mask back, and those that were born meanwhile get the mask that the calling
    thread had. A mask that the kernel does not take back, since the cpuset has shrunk, is left out. Nothing is done
    where threads cannot be bound (macOS, Windows, no /proc).

    Parameters
    ----------
    cpus : collection of int
        Ids of logical CPUs. Those outside of the cpuset have no effect while there are others.

    Raises
    ------
    NanoError
        If the kernel refuses; what was changed is put back first.
    """
    if not _can_bind():
        yield
        return
    own = os.sched_getaffinity(0)
    masks = _masks()
    try:
        _bind(cpus, own)
        yield
    finally:
        _put_back(masks, own)


def _can_bind() -> bool:
    # Where /proc belongs to another PID namespace, the ids in it mean threads of other processes.
    return hasattr(os, "sched_setaffinity") and (_TASKS / str(threading.get_native_id())).is_dir()


def _masks() -> dict[int, set[int]]:
    masks = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended
            masks[thread] = os.sched_getaffinity(thread)
    return masks


def _bind(cpus: Collection[int], own: Collection[int]) -> None:
    try:
        for thread in _each_thread():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cpus)
    except OSError as error:
        refused = f"the kernel refused it ({error.strerror}); this thread had CPUs {format_cpu_list(own)}"
        advice = "See whether the cpuset or the affinity of this process has changed, and start the run again"
        raise NanoError(problem(f"binding to CPUs {format_cpu_list(cpus)}", refused, advice)) from error


def _put_back(masks: dict[int, set[int]], own: Collection[int]) -> None:
    """Give each thread its mask, and `own` to those that have none; nothing here may hide what the body raised."""
    for thread, mask in masks.items():
        _put_back_one(thread, mask)
    # After the others, for this needs a file descriptor, and that the body has used up all may be why it has failed.
    with suppress(OSError):
        for thread in _each_thread():
            if thread not in masks:
                _put_back_one(thread, own)


def _put_back_one(thread: int, mask: Collection[int]) -> None:
    # The id of a thread that has ended may be another process's by now.
    if (_TASKS / str(thread)).is_dir():
        with suppress(OSError):
            os.sched_setaffinity(thread, mask)


def _each_thread() -> Iterator[int]:
    """Yield the id of each thread once, also of those that are born while the caller goes through them."""
    met: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        born = _threads() - met
        if not born:
            return
        yield from sorted(born)
        met |= born


def _threads() -> set[int]:
    return {int(name) for name in os.listdir(_TASKS)}
