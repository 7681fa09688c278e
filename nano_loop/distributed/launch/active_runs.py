"""The active runs of this process: their nesting in each thread, and the run that holds the whole process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from nano_loop.data.workers import advice_of_plain_run
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.failure import flush_output
from nano_loop.distributed.launch.launcher import Task
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.patch_table import process_wide


class _RunsOfThread(threading.local):
    """The ranks of each active run of this thread, the innermost last."""

    def __init__(self) -> None:
        self.ranks: list[Ranks] = []


class _Holder:
    """A run that holds the whole process, its thread, and its ranks if it has several processes."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.thread = threading.current_thread()
        self.ranks: Ranks | None = None


_runs = _RunsOfThread()
#: All in one thread, the innermost last.
_holders: list[_Holder] = process_wide("runs that have the whole process", [])
_choosing = threading.Lock()


def innermost() -> Ranks | None:
    """Return the ranks of the innermost run of this thread; None outside of all runs."""
    return _runs.ranks[-1] if _runs.ranks else None


def of_process() -> Ranks | None:
    """Return the ranks of the multi-process run that this process is in, in any thread, or None."""
    return next((holder.ranks for holder in _holders if holder.ranks is not None), None)


class RunScope:
    """The scope in which a run is the innermost one: this thread, or `in_all_threads` outside of their own runs."""

    def __init__(self, ranks: Ranks, in_all_threads: bool = False) -> None:
        self._ranks = ranks
        self._place = None if in_all_threads else (os.getpid(), threading.get_ident())

    def is_here(self) -> bool:
        """Return whether the calling code is in the scope."""
        if self._place is None:
            return innermost() is None
        return self._place == (os.getpid(), threading.get_ident()) and innermost() is self._ranks


@contextmanager
def active_run(ranks: Ranks) -> Iterator[None]:
    """Record that a run of these ranks is active in this thread."""
    before = len(_runs.ranks)
    try:
        try:
            _runs.ranks.append(ranks)
            if _holders and ranks.size > 1:
                _holders[-1].ranks = ranks
            yield
        finally:
            del _runs.ranks[before:]
    finally:
        del _runs.ranks[before:]  # in case Ctrl-C came just before the line above


@contextmanager
def running(slot: RankSlot, task: Task | None) -> Iterator[None]:
    """Record that this process is a rank of a run during the body."""
    if task is not None:
        slot.ranks.context.loop = task.loop
    slot.ranks.context.common_seed = torch.initial_seed()
    is_bound = bool(slot.ranks.shares)
    with active_run(slot.ranks), advice_of_plain_run(len(slot.host.allowed)) if is_bound else nullcontext():
        yield


def of_ranks(size: int) -> str:
    """Return how a multi-process run uses this process, for the error of a run that conflicts with it."""
    return f"a run of {size} processes, which has the process group and binds all threads"


@contextmanager
def whole_process(option: str, what: str) -> Iterator[None]:
    """Hold the process group and the CPU binding for one run; raise a `NanoError` if another thread's run does.

    `option` requires it, as it was typed, for the error of this run. `what` is how the run uses the process, for that
    of another.
    """
    holder = _Holder(what)
    try:
        try:
            with _choosing:
                if _holders and _holders[-1].thread is not holder.thread:
                    raise NanoError(_refusal(option, _holders[-1]))
                _holders.append(holder)
            yield
        finally:
            _release(holder)
    finally:
        _release(holder)  # in case Ctrl-C came just before the line above


def _release(holder: _Holder) -> None:
    if holder in _holders:
        _holders.remove(holder)


def _refusal(option: str, holder: _Holder) -> str:
    here = threading.current_thread().name
    taken = f"thread {holder.thread.name!r} is in {holder.what}"
    hint = "Start this run when that one has ended, or in a separate process"
    return error_message(f"{option} in thread {here!r}", taken, hint)


@contextmanager
def forked_children_ending() -> Iterator[None]:
    """End forked child processes when they exit the body. They would otherwise end the run and continue the script."""
    process = os.getpid()
    code = 0
    try:
        yield
    except SystemExit as error:
        if os.getpid() == process:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # whatever it is, it belongs to the child
        if os.getpid() == process:
            raise
        traceback.print_exc()
        code = 1
    if os.getpid() != process:
        flush_output()
        os._exit(code & 0xFF)
