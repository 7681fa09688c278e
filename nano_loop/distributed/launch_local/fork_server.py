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
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from nano_loop.cpu.glibc import allocator_of_this_process
from nano_loop.cpu.parent_process import end_with
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.private_files import prepare
from nano_loop.distributed.launch.assignment import Assignment
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.reports import CUT_OFF, DUMP, Frames, Reporter, framed
from nano_loop.distributed.launch.running import work
from nano_loop.distributed.launch_local import stack_dump

_DESCRIPTORS = 4  # that come with each request for a worker: its channel, reports, standard output, standard error


def serve(control: socket.socket, origin: dict[str, Any]) -> NoReturn:
    """Serve the caller until it is gone, has closed its end, or has asked for nothing for a while.

    Parameters
    ----------
    control : socket.socket
        A stream socket to the caller.
    origin : dict
        What `nano_loop.distributed.launch_local.server.Server` has passed to this process.
    """
    preload(origin["modules"], origin["folder"])
    server = ForkServer(control, origin["caller"], origin["idle"])
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
    """See the module."""

    def __init__(self, control: socket.socket, caller: int, idle: float) -> None:
        self._control = control
        self._idle = idle
        self._caller = _handle_of(caller)
        self._frames = Frames()
        self._descriptors: list[int] = []  # that have come for workers to be forked
        self._workers: dict[int, socket.socket] = {}  # the channels that the caller has to them, by their processes
        self._folders: set[str] = set()  # of the runs that are under way
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # interrupts the wait below
        _say(control, {"ready": True})

    def run(self) -> None:
        """Do what the caller asks for, until there is nothing more to do."""
        while True:
            sources: list[Any] = [self._control, self._woken, *([] if self._caller is None else [self._caller])]
            busy = self._workers or self._folders
            channels = [channel for channel in self._workers.values() if channel.fileno() >= 0]
            readable, _, _ = select.select([*sources, *channels], [], [], None if busy else self._idle)
            for pid, channel in self._workers.items():
                if channel in readable:
                    self._obey(pid, channel)
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
        for pid in self._workers:
            _kill_group(pid)
        for pid in self._workers:  # what still runs could write to the folders
            os.waitpid(pid, 0)
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
            _say(self._control, {"answer": True})
        elif kind == "begin":
            self._folders.add(request["folder"])
            missing = [name for name in request["modules"] if name not in sys.modules]
            if missing:
                preload(missing, request["folder"])
        elif kind == "finish":
            self._folders.discard(request["folder"])
        elif kind == "fork":
            descriptors, self._descriptors = self._descriptors[:_DESCRIPTORS], self._descriptors[_DESCRIPTORS:]
            self._fork(request["start"], socket.socket(fileno=descriptors[0]), descriptors[1:])

    def _obey(self, pid: int, channel: socket.socket) -> None:
        """Do what the caller has asked for about one worker; nobody is there to ask if the channel is closed."""
        try:
            request = channel.recv(1)
        except ConnectionResetError:
            request = b""
        if request == DUMP:
            _say(channel, {"state": stack_dump.request(pid)})
        else:
            _kill_group(pid)
        if not request:
            channel.close()

    def _fork(self, start: dict[str, Any], channel: socket.socket, streams: list[int]) -> None:
        server = os.getpid()
        try:
            with warnings.catch_warnings():
                # Python warns of threads: numpy's linear algebra has some, and makes them anew in the child.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError as error:
            _say(channel, {"refused": str(error)})
            channel.close()
        else:
            if pid == 0:
                self._become_worker(server, start, channel, streams)
            self._workers[pid] = channel
        for descriptor in streams:
            os.close(descriptor)

    def _become_worker(
        self, server: int, start: dict[str, Any], channel: socket.socket, streams: list[int]
    ) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # Ctrl-C is for rank 0, and what the worker starts ends with it
            caller = [] if self._caller is None else [self._caller]
            for descriptor in (self._woken, self._waking, *self._descriptors, *caller):
                os.close(descriptor)
            for connection in (self._control, channel, *self._workers.values()):
                connection.close()
            end_with(server)
            _take_streams(*streams[1:])
            _take_over(start)
            stack_dump.dump_on_signal(start["folder"], start["rank"])
            folder, reporter = Path(start["folder"]), Reporter(start["rank"], partial(_write, streams[0]))
            work(reporter, folder, _joined, payload=folder, made=folder, verbose=start["verbose"])
            # Threads of the user's may be running; there is nothing to clean up that rank 0 does not.
            os._exit(CUT_OFF if reporter.is_cut_off else 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Take note of the workers that have ended, and end what they have started."""
        for pid, channel in [*self._workers.items()]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(pid)  # as long as nobody has waited for the worker, its number is not given away
                _, status = os.waitpid(pid, 0)
                del self._workers[pid]
                _say(channel, {"exited": os.waitstatus_to_exitcode(status)})
                channel.close()


def _handle_of(process: int) -> int | None:
    """Return a descriptor that stands for a process, and is readable once that has ended.

    None where this system has none (Linux has, from 5.3 on, unless a sandbox forbids it), or the process has ended.
    """
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _say(connection: socket.socket, header: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, or does not ask any more
        connection.sendall(framed(header))


@contextlib.contextmanager
def _joined(assignment: Assignment, rank: int) -> Iterator[RankSlot]:
    """Connect a worker with the other ranks; a run beside the caller, who is none of its ranks, may have one alone."""
    slot = assignment.slots[rank]
    backend = assignment.options.process_group_backend
    with contextlib.nullcontext() if slot.ranks.size == 1 else local_group(slot.ranks, backend):
        yield slot


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _take_streams(output: int, errors: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)


def _take_over(start: dict[str, Any]) -> None:
    """Take over from the caller's process what a process has from its start."""
    if start["cpus"]:
        os.sched_setaffinity(0, start["cpus"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(start["environ"])
    if os.environ.get("OMP_NUM_THREADS", "") != before and os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read another number
    if start["working_folder"] is not None:
        os.chdir(start["working_folder"])
    sys.argv[:] = start["argv"]
    if start["script"] is not None:  # which processes that are spawned import
        sys.modules["__main__"].__file__ = start["script"]
    importlib.invalidate_caches()


def _kill_group(leader: int) -> None:
    """Kill a worker that nobody has waited for yet, and all that it has started."""
    for kill in (os.killpg, os.kill):  # between its fork and its setsid it has no group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)
