"""Which runs are under way in this process: how they nest in a thread, and which of them has the whole process."""

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
    """The ranks of each run that is under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.ranks: list[Ranks] = []


class _Holder:
    """A run that has the whole process, and the thread that it is in; its ranks, where it is of several processes."""

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
    """Return the ranks of the run of several processes that this one is in, in any thread; None if it is in none."""
    return next((holder.ranks for holder in _holders if holder.ranks is not None), None)


class RunScope:
    """Where a run is the innermost: what happens elsewhere is not its concern.

    Parameters
    ----------
    ranks : Ranks
        Those of the run.
    in_all_threads : bool
        Whether it is for all threads, and for the processes that they fork, outside of all runs of these; else for this
        thread.
    """

    def __init__(self, ranks: Ranks, in_all_threads: bool = False) -> None:
        self._ranks = ranks
        self._place = None if in_all_threads else (os.getpid(), threading.get_ident())

    def is_here(self) -> bool:
        """Return whether this code is in the scope."""
        if self._place is None:
            return innermost() is None
        return self._place == (os.getpid(), threading.get_ident()) and innermost() is self._ranks


@contextmanager
def active_run(ranks: Ranks) -> Iterator[None]:
    """Note that a run of these ranks is under way in this thread."""
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
        del _runs.ranks[before:]  # where Ctrl-C came just before the line above


@contextmanager
def running(slot: RankSlot, task: Task | None) -> Iterator[None]:
    """Note that this process is a rank of a run, for the body."""
    if task is not None:
        slot.ranks.context.loop = task.loop
    slot.ranks.context.common_seed = torch.initial_seed()
    is_bound = bool(slot.ranks.shares)
    with active_run(slot.ranks), advice_of_plain_run(len(slot.host.allowed)) if is_bound else nullcontext():
        yield


def of_ranks(size: int) -> str:
    """Return what a run of several processes does with this one, for the message of a run that it is in the way of."""
    return f"a run of {size} processes, which has the process group and binds all threads"


@contextmanager
def whole_process(option: str, what: str) -> Iterator[None]:
    """Hold the process group and the CPU binding of all threads for one run; in a thread, runs nest.

    Parameters
    ----------
    option : str
        The option that asks for it, as it was typed, for the message of a run that is refused.
    what : str
        What the run does, for the message of a run that is refused because of this one.

    Raises
    ------
    NanoError
        If a run in another thread has the process.
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
        _release(holder)  # where Ctrl-C came just before the line above


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
    """End a process that the body forks as it leaves the body. Else it would end the run and go on with the script."""
    process = os.getpid()
    code = 0
    try:
        yield
    except SystemExit as error:
        if os.getpid() == process:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # whatever it is, it is the child's own
        if os.getpid() == process:
            raise
        traceback.print_exc()
        code = 1
    if os.getpid() != process:
        flush_output()
        os._exit(code & 0xFF)
