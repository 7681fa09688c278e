"""The process that workers are forked from: it has imported torch and nano_loop, and has no threads.

It forks and ends workers at the caller's request, ends them if the caller has ended, and reports their exit status. It
ends after being idle for a while, and with the caller at the latest. So workers are never children of the caller, and
do not interfere with the caller's own children.

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
from typing import Any, NamedTuple, NoReturn

from nano_loop.cpu.process import end_with
from nano_loop.distributed.launch.stream import Stream
from nano_loop.distributed.launch_local import stack_dump
from nano_loop.distributed.launch_local.forked_worker import work_for

_DESCRIPTORS = 3  # per request for a worker: its stream, standard output, standard error


def serve(control: socket.socket, origin: dict[str, Any]) -> NoReturn:
    """Serve the caller until it has ended, has closed its socket `control`, or has been idle for a while."""
    preload(origin["modules"], origin["folder"])
    server = ForkServer(Stream(control), _handle_of(origin["caller"]), origin["idle"])
    try:
        server.run()
    except BaseException:  # the caller shows it as the last output of its workers
        traceback.print_exc()
    finally:
        server.end()


def preload(modules: Sequence[str], folder: str | None) -> None:
    """Import modules once for all workers; one that cannot be imported raises in a worker that needs it.

    Temporary files are in `folder`: this process does not delete what an import creates, such as torch._dynamo in torch
    2.8.
    """
    before, tempfile.tempdir = tempfile.tempdir, folder
    for name in modules:
        with contextlib.suppress(Exception):  # the caller has imported it, and this process must continue
            importlib.import_module(name)
    tempfile.tempdir = before
    gc.collect()
    gc.freeze()  # keeps the pages of imported objects shared by all workers


class ForkedProcess(NamedTuple):
    """A worker, its run's folder, and its rank."""

    pid: int
    folder: str
    rank: int


class ForkServer:
    """The server. `caller` is a descriptor that is readable when the caller has ended, or None if there are no such."""

    def __init__(self, control: Stream, caller: int | None, idle: float) -> None:
        self._control = control
        self._idle = idle
        self._caller = caller
        self._workers: dict[Stream, ForkedProcess] = {}  # by the stream to the caller
        self._folders: set[str] = set()  # of active runs
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # interrupts the wait below

    def run(self) -> None:
        """Handle the caller's requests until there is nothing more to do."""
        with contextlib.suppress(OSError):  # the caller has ended
            self._control.send("ready", pid=os.getpid())
        sources: list[Any] = [self._control, self._woken, *([] if self._caller is None else [self._caller])]
        while True:
            busy = self._workers or self._folders
            streams = [stream for stream in self._workers if stream.is_open]
            readable, _, _ = select.select([*sources, *streams], [], [], None if busy else self._idle)
            if self._woken in readable:
                os.read(self._woken, 1 << 12)
                self._reap()
            for stream in self._workers.keys() & {*readable}:
                self._heed(stream, self._workers[stream])
            if self._control in readable:  # read first even if the caller has ended: it names the folders to delete
                for request, _ in self._control.receive():
                    self._do(**request)
                if not self._control.is_open:
                    return
            elif self._caller in readable or not (readable or busy):
                return

    def end(self) -> NoReturn:
        """Kill all workers and what they have started, delete files left by the runs, and end this process."""
        for worker in self._workers.values():
            _kill_group(worker.pid)
        for worker in self._workers.values():  # running processes could still write to the folders
            os.waitpid(worker.pid, 0)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _do(self, kind: str, folder: str = "", start: dict[str, Any] | None = None, **_: Any) -> None:
        """Handle a request of the caller."""
        if kind == "begin":
            self._folders.add(folder)
        elif kind == "finish":
            self._folders.discard(folder)
        elif kind == "fork" and start is not None:
            self._fork(start)

    # --- workers ---

    def _fork(self, start: dict[str, Any]) -> None:
        connection, *outputs = [self._control.descriptors.pop(0) for _ in range(_DESCRIPTORS)]
        stream = Stream(socket.socket(fileno=connection))
        try:
            self._workers[stream] = ForkedProcess(self._forked(start, stream, outputs), start["folder"], start["rank"])
        except OSError as error:
            _say_last(stream, "refused", reason=str(error))
        for descriptor in outputs:
            os.close(descriptor)

    def _heed(self, stream: Stream, worker: ForkedProcess) -> None:
        """Handle requests on a worker's stream; if the caller has closed it, end the worker."""
        kinds = {request["kind"] for request, _ in stream.receive()}
        if "stack" in kinds:
            stack_dump.request(*worker)
        if "kill" in kinds or not stream.is_open:
            _kill_group(worker.pid)

    def _forked(self, start: dict[str, Any], stream: Stream, outputs: list[int]) -> int:
        """Return the id of a new worker, which ends with this process at the latest."""
        server = os.getpid()
        with warnings.catch_warnings():
            # Python warns about threads: numpy's BLAS has some, and recreates them in the child.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid:
            return pid
        try:
            self._leave()
            end_with(server)
            work_for(start, stream, *outputs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _leave(self) -> None:
        """Release the server's resources in a worker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # Ctrl-C goes to rank 0 only; a session also lets its children be killed together
        caller = [] if self._caller is None else [self._caller]
        for descriptor in (self._woken, self._waking, *self._control.descriptors, *caller):
            os.close(descriptor)
        for stream in (self._control, *self._workers):
            stream.close()

    def _reap(self) -> None:
        """Record the workers that have ended, and end the processes that they have started."""
        for stream, (pid, *_) in [*self._workers.items()]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(pid)  # the process id is not reused before the worker is waited for
                _, status = os.waitpid(pid, 0)
                del self._workers[stream]
                _say_last(stream, "exited", exitcode=os.waitstatus_to_exitcode(status))


def _say_last(stream: Stream, kind: str, **header: Any) -> None:
    """Report the end of a worker. Nothing else writes to its stream then."""
    with contextlib.suppress(OSError):  # the caller has ended
        stream.send(kind, **header)
    stream.close()


def _kill_group(leader: int) -> None:
    """Kill a process that has not been waited for yet, and everything that it has started."""
    for kill in (os.killpg, os.kill):  # there is no group between the fork and setsid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def _handle_of(process: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None if it has, before Linux 5.3 or sandboxed."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None
