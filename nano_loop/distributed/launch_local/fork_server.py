"""The process that worker processes are forked from: it has imported torch and nano_loop, and holds no thread.

It forks workers when the caller asks, ends them when the caller asks or is gone, and says how each of them has ended.
Without work it ends after a while, and in any case with the caller. A worker is so never a child of the caller's, and
the caller's own children are not disturbed.

`nano_loop.distributed.launch_local.server.BOOTSTRAP` calls `serve`.
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
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from nano_loop.cpu.glibc import allocator_of_this_process
from nano_loop.cpu.parent_process import end_with
from nano_loop.distributed.files.private_files import prepare
from nano_loop.distributed.launch.stream import Stream
from nano_loop.distributed.launch_local import stack_dump
from nano_loop.distributed.launch_local.forked_worker import work_for

_DESCRIPTORS = 3  # that come with each request for a worker: its stream, standard output, standard error


def serve(control: socket.socket, origin: dict[str, Any]) -> NoReturn:
    """Serve the caller until it has ended, has closed its socket, or has been idle for a while.

    Parameters
    ----------
    control : socket.socket
        A stream socket to the caller.
    origin : dict
        What `nano_loop.distributed.launch_local.server.Server` has passed to this process.
    """
    preload(origin["modules"], origin["folder"])
    server = ForkServer(Stream(control), _handle_of(origin["caller"]), origin["idle"])
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
    gc.collect()
    gc.freeze()  # so that the pages of what has been imported stay common to all workers


class ForkServer:
    """See the module.

    Parameters
    ----------
    control : Stream
        The end of the socket to the caller.
    caller : int or None
        A descriptor that is readable when the caller has ended; None where the system has none.
    idle : float
        Seconds without a run after which the process ends.
    """

    def __init__(self, control: Stream, caller: int | None, idle: float) -> None:
        self._control = control
        self._idle = idle
        self._caller = caller
        self._workers: dict[int, int] = {}  # their processes, by the numbers that the caller has given them
        self._folders: set[str] = set()  # of the runs that are under way
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # interrupts the wait below

    def run(self) -> None:
        """Do what the caller asks for, until there is nothing more to do."""
        self._say("ready")
        sources: list[Any] = [self._control, self._woken, *([] if self._caller is None else [self._caller])]
        while True:
            busy = self._workers or self._folders
            readable, _, _ = select.select(sources, [], [], None if busy else self._idle)
            if self._woken in readable:
                os.read(self._woken, 1 << 12)
                self._reap()
            if self._control in readable:  # also of a caller that is gone: it has said which folders are to be deleted
                for request, _ in self._control.receive():
                    self._do(**request)
                if not self._control.is_open:
                    return
            elif self._caller in readable or not (readable or busy):
                return

    def end(self) -> NoReturn:
        """Kill all workers and what they have started, delete what the runs have left, and end this process."""
        for pid in self._workers.values():
            _kill_group(pid)
        for pid in self._workers.values():  # what still runs could write to the folders
            os.waitpid(pid, 0)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _do(self, kind: str, worker: int = -1, folder: str = "", start: dict[str, Any] | None = None, **_: Any) -> None:
        """Do what the caller has asked for; a worker that has ended is none of this process's any more."""
        if kind == "answer":
            self._say("answer")
        elif kind == "begin":
            self._folders.add(folder)
        elif kind == "finish":
            self._folders.discard(folder)
        elif kind == "fork" and start is not None:
            self._fork(worker, start)
        elif kind == "kill" and worker in self._workers:
            _kill_group(self._workers[worker])
        elif kind == "stack" and worker in self._workers:
            self._say("stack", worker=worker, state=stack_dump.request(self._workers[worker]))

    def _say(self, kind: str, **header: Any) -> None:
        with contextlib.suppress(OSError):  # the caller is gone
            self._control.send(kind, **header)

    # --- workers ---

    def _fork(self, worker: int, start: dict[str, Any]) -> None:
        descriptors = [self._control.descriptors.pop(0) for _ in range(_DESCRIPTORS)]
        try:
            self._workers[worker] = self._forked(start, descriptors)
        except OSError as error:
            self._say("refused", worker=worker, reason=str(error))
        for descriptor in descriptors:
            os.close(descriptor)

    def _forked(self, start: dict[str, Any], descriptors: list[int]) -> int:
        """Return a new worker, which ends with this process at the latest."""
        server = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads: numpy's linear algebra has some, and makes them anew in the child.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid:
            return pid
        try:
            self._leave()
            end_with(server)
            work_for(start, *descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _leave(self) -> None:
        """Release the server's resources, in a worker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # Ctrl-C is for rank 0, and what the process starts ends with it
        caller = [] if self._caller is None else [self._caller]
        for descriptor in (self._woken, self._waking, *self._control.descriptors, *caller):
            os.close(descriptor)
        self._control.close()

    def _reap(self) -> None:
        """Take note of the workers that have ended, and end what they have started."""
        for worker, pid in [*self._workers.items()]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(pid)  # as long as nobody has waited for the worker, its number is not given away
                _, status = os.waitpid(pid, 0)
                del self._workers[worker]
                self._say("exited", worker=worker, exitcode=os.waitstatus_to_exitcode(status))


def _kill_group(leader: int) -> None:
    """Kill a process that nobody has waited for yet, and all that it has started."""
    for kill in (os.killpg, os.kill):  # between its fork and its setsid it has no group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def _handle_of(process: int) -> int | None:
    """Return a descriptor that stands for a process, and is readable once that has ended.

    None where this system has none (Linux has, from 5.3 on, unless a sandbox forbids it), or the process has ended.
    """
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None
