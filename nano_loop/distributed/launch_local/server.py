"""The caller's side of the fork server, the process that workers are forked from: starts, uses and ends it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.system_limits import limit_in_words
from nano_loop.distributed.launch.stream import Stream
from nano_loop.distributed.launch_local.output import Output, pipe, standard_streams_open
from nano_loop.distributed.launch_local.start import cpus_of, origin_of
from nano_loop.errors import NanoWorkerError, error_message
from nano_loop.patching.torch_private import is_older_than
from nano_loop.patching.torch_private_compiler import COMPILER_PACKAGE

#: Seconds within which a live process answers.
HELLO = 1.0
_ENDING = 2.0  # seconds for its workers to end
_UNFORKED = 75  # exit code of the first process if the second cannot be forked: EX_TEMPFAIL of sysexits.h
# The first process ends immediately, so that the second one is not the caller's child: `os.wait` in the user's program
# never sees it. The working folder, which -c puts first on the path, is removed, since a json.py in it would shadow
# Python's. CPUs are set before any thread exists, which would keep another mask. Garbage collection is disabled, since
# it takes a fifth of the start and imports create no garbage. torch 2.8 creates a temporary folder on import, which a
# killed process would leave behind, so it is created in the first run's own folder.
BOOTSTRAP = """
import os, sys
try:
    if os.fork():
        os._exit(0)
except OSError:
    os._exit(@UNFORKED@)
sys.path[:] = filter(None, sys.path)
import gc, json, socket, tempfile
gc.disable()
origin = json.loads(sys.stdin.buffer.readline())
control = socket.socket(fileno=int(sys.argv[1]))
if origin["cpus"]:
    os.sched_setaffinity(0, origin["cpus"])
sys.path[:] = origin["path"]
tempfile.tempdir = origin["folder"]
from nano_loop.distributed.launch_local.fork_server import serve
tempfile.tempdir = None
serve(control, origin)
""".replace("@UNFORKED@", str(_UNFORKED))


class Server:
    """Handle of a process running `nano_loop.distributed.launch_local.fork_server`.

    Only one thread at a time reads its replies. The process also imports `modules`, with temporary files in `folder`.
    """

    def __init__(self, origin: dict[str, Any], cpus: list[int], folder: str | None, modules: Iterable[str]) -> None:
        self.origin = origin
        self.ready = False  # whether it has finished its imports
        self.gone = False  # whether it has ended
        self.pid: int | None = None  # known once it is ready
        self._used = time.monotonic()  # when it was last asked for something
        self._reading = threading.RLock()
        setup = {"path": origin["path"], "cpus": cpus, "folder": folder, "caller": os.getpid(), "idle": IDLE}
        with contextlib.ExitStack() as stack:
            ours, other = socket.socketpair()
            self._control = Stream(ours)
            stack.callback(self._control.close)
            with other:
                reading, writing = pipe()
                stack.callback(os.close, reading)
                try:
                    self._process = _popen(origin, other.fileno(), writing)
                finally:
                    os.close(writing)
            self._resources = stack.pop_all()
        self.output = Output(reading, sys.stderr, "[workers] ")
        with contextlib.suppress(BrokenPipeError):  # it has already ended, which is detected later
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({**setup, "modules": [*modules]}).encode() + b"\n")
            self._process.stdin.close()

    @property
    def sources(self) -> Sequence[Any]:
        """The objects that are readable when there is a reply."""
        return [] if self.gone else [self._control, *([self.output.descriptor] if self.output.is_open else [])]

    @property
    def exitcode(self) -> int | None:
        """The exit code of a Python that did not start; None if it started."""
        return self._process.returncode or None

    @property
    def refusal(self) -> str | None:
        """The reason why the system refused to start it; None if it did not."""
        return os.strerror(errno.EAGAIN) if self.gone and self.exitcode == _UNFORKED else None

    def is_usable(self) -> bool:
        """Whether it will fork workers, now or after its imports, and is not about to end by itself."""
        self.read_replies()
        return not self.gone and time.monotonic() < self._used + IDLE - HELLO

    def ask(self, kind: str, **header: Any) -> None:
        """Send a request: "begin" a run, whose folder it deletes if this process is killed, "finish" it, or "fork".

        The last one has the `descriptors` of a worker, whose stream then reports how it "exited" or was "refused".
        """
        self._used = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # detected by `read_replies`
            if not self.gone:
                self._control.send(kind, **header)

    def read_replies(self) -> None:
        """Process its replies without waiting."""
        with self._reading:
            if not self.gone:
                self._take_replies()
                self.output.relay()
                if not self._control.is_open:
                    self._reap()

    def end(self) -> None:
        """End it with all of its workers immediately."""
        with self._reading:
            if self.gone:
                return
            self._control.end()  # it then ends its workers, with all that they have started, and itself
            if not self.ready or not self._has_closed(_ENDING):
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the first process leads its group
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._reap()

    def forget(self) -> None:
        """Close the resources of a forked process: the server belongs to its parent."""
        self.gone = True
        self._resources.close()

    def _take_replies(self) -> None:
        self._process.poll()  # the first process ends once it has forked the server
        for header, _ in self._control.receive():  # that it is ready
            self.ready, self.pid = True, header["pid"]

    def _has_closed(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._control.is_open and wait([self._control.fileno()], max(0.0, deadline - time.monotonic())):
            self._take_replies()
        return not self._control.is_open

    def _reap(self) -> None:
        self.gone = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(HELLO)
        self.output.relay()
        self.output.finish()
        self._resources.close()


def _popen(origin: dict[str, Any], control: int, errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*origin["command"], "-c", BOOTSTRAP, str(control)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=origin["environ"],
        pass_fds=(control,),
        start_new_session=True,  # Ctrl-C goes to rank 0 only
    )


# --- the one that is kept for the next run ---
# Starting Python and importing torch takes seconds; forking takes milliseconds. So the first run starts it, or even
# earlier a script that will need it. The kept process uses no CPU, and ends automatically after a minute without a run,
# with the caller, or when a run needs another environment.

_IS_PYTHON = "every rank except the first is a Python process that nano_loop starts"
_HAS_NANO_LOOP = "Set sys.executable to a Python that has nano_loop"

_TASKS = tuple(f"nano_loop.{room}" for room in ("api", "integrations.lightning"))  # not imported by the rooms below
#: Seconds without a run after which the process ends.
IDLE = 60.0

kept: list[Server] = []  # at most one


def server_for(slot: RankSlot) -> Server:
    """Return the server for the worker of a slot, and others like it: the kept one if it fits, or a new one."""
    folder = slot.ranks.folder
    assert folder is not None
    origin = origin_of(slot)
    while kept:
        server = kept.pop()
        if server.origin == origin and server.is_usable():
            return server
        server.end()
    reason = f"rank {slot.ranks.rank} could not be started"
    if not sys.executable:
        message = error_message(f"{reason}: sys.executable is {sys.executable!r}", _IS_PYTHON, _HAS_NANO_LOOP)
        raise NanoWorkerError(message, rank=slot.ranks.rank)
    try:
        return Server(origin, cpus_of(slot), str(folder), _imported())
    except OSError as error:
        if limit_in_words(error, folder):
            raise
        message = error_message(f"{reason} with {sys.executable!r} ({error})", _IS_PYTHON, _HAS_NANO_LOOP)
        raise NanoWorkerError(message, rank=slot.ranks.rank) from error


def _imported() -> list[str]:
    """Return the modules of tasks that this process has imported, and those that optimizers import, which are slow."""
    return [name for name in [*sys.modules] if name.startswith(_TASKS) or name == COMPILER_PACKAGE]


def start_early(slot: RankSlot) -> None:
    """Start the server for a future run, if possible: it imports torch while the caller creates its model."""
    # Importing torch 2.8 creates a temporary folder, which should be in the folder of a run.
    if kept or not sys.executable or is_older_than(2, 9):
        return
    with contextlib.suppress(OSError), standard_streams_open():
        _keep(Server(origin_of(slot), cpus_of(slot), None, [*_imported(), COMPILER_PACKAGE]))


def keep(server: Server) -> None:
    """Keep a server that has no workers left for the next run."""
    server.read_replies()
    if server.ready and not server.gone and not kept:
        _keep(server)
    else:
        server.end()


def _keep(server: Server) -> None:
    kept.append(server)
    atexit.unregister(end_kept)
    atexit.register(end_kept)  # with ``-X dev``, Python would warn about an unclosed connection


def end_kept() -> None:
    """End the kept server, if there is one."""
    while kept:
        kept.pop().end()


def _forget_kept() -> None:
    while kept:
        kept.pop().forget()


os.register_at_fork(after_in_child=_forget_kept)  # it belongs to the parent
