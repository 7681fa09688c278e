"""The process that worker processes are forked from: it has imported torch and nano_loop, and holds no thread.

It forks workers when the caller asks, ends them when the caller asks or is gone, and says how each of them has ended.
Without work it ends after a while, and in any case with the caller. A worker is so never a child of the caller's, and
the caller's own children are not disturbed.

`nano_loop.distributed.launch.local.start.BOOTSTRAP` calls `serve`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from nano_loop.distributed.files.private_files import prepare
from nano_loop.distributed.launch.local import whereabouts
from nano_loop.distributed.launch.local.frames import Frames, framed
from nano_loop.distributed.launch.local.handle import handle_of
from nano_loop.distributed.launch.local.spares import STREAMS, Spares, Wait, forked
from nano_loop.distributed.launch.local.start import Start
from nano_loop.distributed.launch.local.worker import main
from nano_loop.glibc import allocator_of_this_process
from nano_loop.parent_process import end_with

_RUN, _REHEARSAL = "nano_loop.run", "nano_loop.rehearsal"  # of rooms above this one, and imported by name
_SOON = 0.01  # seconds in which a loop that calls again at once does so


def serve(control: socket.socket, caller: int, idle: float) -> NoReturn:
    """Serve the caller until it is gone, has closed its end, or has asked for nothing for a while.

    Parameters
    ----------
    control : socket.socket
        A stream socket to the caller.
    caller : int
        The caller's process.
    idle : float
        Seconds without a run after which this process ends.
    """
    server = ForkServer(control, caller, idle)
    try:
        server.run()
    except BaseException:  # the caller shows it as the last words of its workers
        traceback.print_exc()
    finally:
        server.end()


def preload(modules: Sequence[str], folder: str | None) -> None:
    """Import modules once for all workers; one that cannot be imported raises in a worker that needs it.

    Parameters
    ----------
    modules : sequence of str
        Their names.
    folder : str or None
        The temporary folder meanwhile: this process deletes none that an import makes, as torch._dynamo's does in
        torch 2.8. None for the system's.
    """
    before, tempfile.tempdir = tempfile.tempdir, folder
    for name in modules:
        with contextlib.suppress(Exception):  # any, for the caller has imported it, and this process must go on
            importlib.import_module(name)
    tempfile.tempdir = before
    prepare()
    allocator_of_this_process()  # which takes 2 ms in a worker
    if _RUN in sys.modules:
        importlib.import_module(_REHEARSAL).script()
    gc.collect()
    gc.freeze()  # so that the pages of what has been imported stay common to all workers


class ForkServer:
    """See the module."""

    def __init__(self, control: socket.socket, caller: int, idle: float) -> None:
        self._control = control
        self._idle = idle
        self._caller = handle_of(caller)
        self._frames = Frames()
        self._descriptors: list[int] = []  # that have come for workers to be forked
        self._tokens: dict[int, int] = {}  # what the caller calls each worker, by its process
        self._replaced: set[int] = set()  # those of them for which another was forked ahead, or is not needed
        self._spares = Spares()
        self._folders: set[str] = set()  # of the runs that are under way
        self._woken, writing = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._waking = writing
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # interrupts the wait below
        self._say({"ready": True})

    def run(self) -> None:
        """Do what the caller asks for, until there is nothing more to do."""
        while True:
            sources: list[Any] = [self._control, self._woken, *([] if self._caller is None else [self._caller])]
            busy = self._tokens or self._folders
            patience = 0 if self._spares.are_missing else None if busy else self._idle
            readable, _, _ = select.select(sources, [], [], patience)
            if not readable and self._spares.are_missing:
                self._fork_ahead()
                continue
            if self._woken in readable:
                os.read(self._woken, 1 << 12)
                self._reap()
            if self._control in readable:  # also of a caller that is gone: it has said which folders are to be deleted
                if not self._read():
                    return
            elif self._caller in readable or not (readable or busy):
                return

    def end(self) -> NoReturn:
        """Kill all workers and what they have started, delete what the runs have left, and end this process."""
        for pid in self._tokens:
            _kill_group(pid)
        for pid in self._tokens:  # what still runs could write to the folders
            os.waitpid(pid, 0)
        self._spares.clear()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _read(self) -> bool:
        """Do what the caller has asked for; return whether it may ask for more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        except ConnectionResetError:
            return False
        self._descriptors += descriptors
        for header, _ in self._frames.feed(data):
            self._do(header)
        return bool(data)

    def _do(self, request: dict[str, Any]) -> None:
        kind = request["ask"]
        if kind == "answer":
            self._say({"answer": True})
        elif kind == "begin":
            self._folders.add(request["folder"])
            missing = [name for name in request["modules"] if name not in sys.modules]
            if missing:
                self._spares.clear()
                preload(missing, request["folder"])
        elif kind == "finish":
            self._folders.discard(request["folder"])
        elif kind == "fork":
            streams, self._descriptors = self._descriptors[:STREAMS], self._descriptors[STREAMS:]
            self._fork(request["token"], request["start"], streams, request["again"])
        elif kind in ("kill", "show"):
            for pid in [pid for pid, token in self._tokens.items() if token == request["token"]]:
                if kind == "kill":
                    _kill_group(pid)
                    self._expect_another(pid)
                else:
                    self._say({"shown": request["token"], "state": whereabouts.ask(pid)})

    def _fork(self, token: int, start: str, streams: list[int], again: bool) -> None:
        if not self._tokens:  # the first of a run
            self._spares.expected = 0
        server = os.getpid()
        try:
            pid = self._spares.take(start, streams) or forked()
        except OSError as error:
            self._say({"unforked": token, "why": str(error)})
        else:
            if pid == 0:
                self._spares.leave()
                self._become_worker(server, lambda: (start, streams))
            self._tokens[pid] = token
            if not again:
                self._replaced.add(pid)
        for each in streams:
            os.close(each)

    def _fork_ahead(self) -> None:
        server = os.getpid()

        def assigned(wait: Wait) -> tuple[str, list[int]]:
            _rehearse(wait)
            return wait.until_needed()

        self._spares.fork(lambda wait: self._become_worker(server, lambda: assigned(wait)))

    def _expect_another(self, ended: int) -> None:
        """Note that a worker ends, and that the next run may need one in its place."""
        self._spares.expected += ended not in self._replaced
        self._replaced.add(ended)

    def _become_worker(self, server: int, assigned: Callable[[], tuple[str, list[int]]]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # Ctrl-C is for rank 0, and what the worker starts ends with it
            for each in (self._woken, self._waking, *([] if self._caller is None else [self._caller])):
                os.close(each)
            self._control.close()
            end_with(server)
            path, streams = assigned()
            _take_streams(*streams[1:])
            start = Start.read(path)
            _take_over(start)
            whereabouts.told_on_demand(start.folder, start.rank)
            main(Path(start.folder), start.rank, streams[0], start.verbose)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Take note of the workers that have ended, and end what they have started."""
        for pid in self._spares.processes:
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                self._spares.forget(pid)
        for pid, token in [*self._tokens.items()]:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                _kill_group(pid)  # as long as nobody has waited for the worker, its number is not given away
                _, status = os.waitpid(pid, 0)
                self._expect_another(pid)
                self._replaced.discard(pid)
                del self._tokens[pid]
                self._say({"exited": token, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, header: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the caller is gone, which `run` notices
            self._control.sendall(framed(header))


def _rehearse(wait: Wait) -> None:
    """Do beforehand, and without effect, what a worker does, as long as it is not needed.

    A process copies each page of its parent's memory that it writes to, which takes most of the time of a short run.
    """
    if wait.is_over_within(0):
        return
    importlib.invalidate_caches()
    if _REHEARSAL in sys.modules:
        # Any exception: the run is undone, and the worker does not need it.
        with contextlib.suppress(Exception), contextlib.closing(sys.modules[_REHEARSAL].rehearse()) as pieces:
            while not wait.is_over_within(_SOON) and next(pieces, True) is None:
                pass


def _take_streams(output: int, errors: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)


def _take_over(start: Start) -> None:
    """Take over from the caller's process what a process has from its start."""
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(start.environ)
    if os.environ.get("OMP_NUM_THREADS", "") != before and os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read another number
    if start.working_folder is not None:
        os.chdir(start.working_folder)
    sys.argv[:] = start.argv
    importlib.invalidate_caches()


def _kill_group(leader: int) -> None:
    """Kill a worker that nobody has waited for yet, and all that it has started."""
    for kill in (os.killpg, os.kill):  # between its fork and its setsid it has no group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)
