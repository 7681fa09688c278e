"""The process that worker processes are forked from: it has imported torch and nano_loop, and holds no thread.

It forks workers when the caller asks, ends them when the caller asks or is gone, and says how each of them has ended.
Without work it ends after a while, and in any case with the caller. A worker is so never a child of the caller's, and
the caller's own children are not disturbed.

`nano_loop.distributed.launch_local.server.BOOTSTRAP` calls `serve`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from nano_loop.cpu.glibc import allocator_of_this_process
from nano_loop.cpu.parent_process import end_with
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Ranks, RunContext
from nano_loop.distributed.files.private_files import prepare
from nano_loop.distributed.launch.group import local_group
from nano_loop.distributed.launch.stream import Reporter, Stream
from nano_loop.distributed.launch.worker import Assignment, work
from nano_loop.integrations.fabric.rank_zero import note_rank

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


class ForkedProcess(NamedTuple):
    """A worker, the folder of its run, and its rank."""

    pid: int
    folder: str
    rank: int


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
        self._workers: dict[Stream, ForkedProcess] = {}  # by their streams to the caller
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
            streams = [stream for stream in self._workers if stream.is_open]
            readable, _, _ = select.select([*sources, *streams], [], [], None if busy else self._idle)
            if self._woken in readable:
                os.read(self._woken, 1 << 12)
                self._reap()
            for stream in self._workers.keys() & {*readable}:
                self._heed(stream, self._workers[stream])
            if self._control in readable:  # also of a caller that is gone: it has said which folders are to be deleted
                for request, _ in self._control.receive():
                    self._do(**request)
                if not self._control.is_open:
                    return
            elif self._caller in readable or not (readable or busy):
                return

    def end(self) -> NoReturn:
        """Kill all workers and what they have started, delete what the runs have left, and end this process."""
        for worker in self._workers.values():
            _kill_group(worker.pid)
        for worker in self._workers.values():  # what still runs could write to the folders
            os.waitpid(worker.pid, 0)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _do(self, kind: str, folder: str = "", start: dict[str, Any] | None = None, **_: Any) -> None:
        """Do what the caller has asked for."""
        if kind == "answer":
            self._say("answer")
        elif kind == "begin":
            self._folders.add(folder)
        elif kind == "finish":
            self._folders.discard(folder)
        elif kind == "fork" and start is not None:
            self._fork(start)

    def _say(self, kind: str) -> None:
        with contextlib.suppress(OSError):  # the caller is gone
            self._control.send(kind)

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
        """Do what the caller has asked for on a worker's stream; where it has closed that, end the worker."""
        kinds = {request["kind"] for request, _ in stream.receive()}
        if "stack" in kinds:
            request_stacks(*worker)
        if "kill" in kinds or not stream.is_open:
            _kill_group(worker.pid)

    def _forked(self, start: dict[str, Any], stream: Stream, outputs: list[int]) -> int:
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
            work_for(start, stream, *outputs)
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
        for stream in (self._control, *self._workers):
            stream.close()

    def _reap(self) -> None:
        """Take note of the workers that have ended, and end what they have started."""
        for stream, (pid, *_) in [*self._workers.items()]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(pid)  # as long as nobody has waited for the worker, its number is not given away
                _, status = os.waitpid(pid, 0)
                del self._workers[stream]
                _say_last(stream, "exited", exitcode=os.waitstatus_to_exitcode(status))


def _say_last(stream: Stream, kind: str, **header: Any) -> None:
    """Say what has become of a worker. Nobody else writes to its stream then."""
    with contextlib.suppress(OSError):  # the caller is gone
        stream.send(kind, **header)
    stream.close()


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


# --- a worker, from its fork on ---


def work_for(start: dict[str, Any], stream: Stream, output: int, errors: int) -> None:
    """Do the work of a rank in this process, and end it.

    Parameters
    ----------
    start : dict
        What `nano_loop.distributed.launch_local.start.start_of` has returned.
    stream : Stream
        Its stream to rank 0.
    output, errors : int
        The descriptors of its standard output and its standard error.
    """
    _take_streams(output, errors)
    _take_over(start)
    dump_stacks_on_signal(start["folder"], start["rank"])
    reporter = Reporter(start["rank"], stream.send)
    folder = Path(start["folder"])
    work(reporter, folder, functools.partial(_joined, reporter), payload=folder)
    # Threads of the user's may be running; there is nothing to clean up that rank 0 does not.
    os._exit(0)


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


@contextlib.contextmanager
def _joined(reporter: Reporter, assignment: Assignment, rank: int) -> Iterator[RankSlot]:
    """Connect a worker with the other ranks; the one after the last is the witness, and is alone."""
    if rank == assignment.size:
        note_rank(None)
        _end_at_sockets(reporter)
        first = assignment.slots[0]
        yield RankSlot(Ranks(context=RunContext(witness=reporter.report)), first.machine, first.host)
        return
    slot = assignment.slots[rank]
    with local_group(slot.ranks, assignment.options.process_group_backend):
        yield slot


def _end_at_sockets(reporter: Reporter) -> None:
    """End this process, whose other effects are dropped, before it talks to another host."""
    process = os.getpid()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.bind", "socket.sendto") and isinstance(arguments[1], tuple):
            if os.getpid() == process:
                reporter.report("ends", why=f"it opens a socket ({event})")
            os._exit(0)

    sys.addaudithook(audit)


def _take_streams(output: int, errors: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)


# --- where its threads are: it writes that to a file when a signal comes, whatever it is doing then ---

#: Not one that a loop handles; handled in C, so also where Python's lock is held.
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 1
_LONGEST = 20_000  # characters
_STOPPED = ("T", "t")  # states of a process, as in /proc
_IS_STOPPED = "it is stopped, by SIGSTOP or a debugger; kill -CONT makes it go on"


def dump_stacks_on_signal(folder: str, rank: int) -> None:
    """Let this process write the stacks of its threads to a file in the run's folder whenever the signal comes."""
    try:
        file = _path(folder, rank).open("w")  # stays open as long as the process lives
    except OSError:  # the folder has no room, which what comes next says better
        signal.signal(_SIGNAL, signal.SIG_IGN)
    else:
        faulthandler.register(_SIGNAL, file, all_threads=True)


def request_stacks(process: int, folder: str, rank: int) -> None:
    """Send the signal; of a process that is stopped, write down that."""
    with contextlib.suppress(OSError):  # there is no /proc, or the process is gone
        os.kill(process, _SIGNAL)
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in _STOPPED:
            _path(folder, rank).write_text(_IS_STOPPED)


def read_stacks(folder: str, rank: int, deadline: float) -> str:
    """Return what the process has written, once that is complete; nothing where it writes nothing."""
    dump, path = "", _path(folder, rank)
    while time.monotonic() < deadline:
        written = path.read_text(errors="replace") if path.exists() else ""
        if written and written == dump:
            break
        dump = written
        time.sleep(0.02)
    return dump[:_LONGEST]


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"
