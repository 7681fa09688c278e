"""The caller's side of the process that workers are forked from: it starts it, asks it for workers, and ends it."""

from __future__ import annotations

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

from nano_loop.distributed.launch.reports import Frames, framed, read_available
from nano_loop.distributed.launch_local.output import Output, above_stdio, pipe

#: SIGPIPE may end the caller's process.
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
#: Seconds in which a process that is there answers.
HELLO = 1.0
_ENDING = 2.0  # seconds that its workers may take to end
_UNFORKED = 75  # of the first process where the system refuses the second; that of a temporary failure in sysexits.h
# The first process ends at once, so that what it leaves is no child of the caller's: `os.wait` in the user's program
# never meets it. Of the working folder, which -c puts first on the path, a json.py would be taken for Python's own.
# CPUs are chosen before a thread exists that would keep another mask. Nothing of what imports make is garbage: to look
# for it takes a fifth of the start. torch 2.8 makes a temporary folder when it is imported, which a killed process
# would leave behind: in the first run's own folder it goes with that.
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
try:
    control.sendall(json.dumps({"hello": os.getpid(), "bytes": 0}).encode() + b"\\n")
except OSError:  # the caller is gone, and has left a folder
    pass
if origin["cpus"]:
    os.sched_setaffinity(0, origin["cpus"])
sys.path[:] = origin["path"]
tempfile.tempdir = origin["folder"]
from nano_loop.distributed.launch_local.fork_server import serve
tempfile.tempdir = None
serve(control, origin)
""".replace("@UNFORKED@", str(_UNFORKED))


class Server:
    """A process of `nano_loop.distributed.launch_local.fork_server`.

    Its answers are read in one thread at a time; requests may come from any thread.

    Parameters
    ----------
    origin : dict
        What `nano_loop.distributed.launch_local.start.origin_of` has returned.
    cpus : list of int
        Where it imports; empty for no binding.
    folder : str or None
        The temporary folder while it imports; None for the system's.
    idle : float
        Seconds without a run after which the process ends.
    modules : iterable of str
        What it imports besides torch.
    """

    def __init__(
        self, origin: dict[str, Any], cpus: list[int], folder: str | None, idle: float, modules: Iterable[str]
    ) -> None:
        self.origin = origin
        self.owner = os.getpid()
        self.ready = self.gone = self._answered = False
        self.pid: int | None = None  # known once it has begun
        self.reading = threading.RLock()
        self._frames = Frames()
        self._sending = threading.Lock()
        setup = {"path": origin["path"], "cpus": cpus, "folder": folder, "caller": os.getpid(), "idle": idle}
        with contextlib.ExitStack() as stack:
            self._control, other = _socket_pair()
            stack.callback(self._control.close)
            with other:
                reading, writing = pipe()
                stack.callback(os.close, reading)
                try:
                    self._process = _popen(origin, other.fileno(), writing)
                finally:
                    os.close(writing)
            self._resources = stack.pop_all()
        self._output = Output(reading, sys.stderr, "[workers] ")
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is seen soon enough
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({**setup, "modules": [*modules]}).encode() + b"\n")
            self._process.stdin.close()

    @property
    def sources(self) -> Sequence[Any]:
        """What is readable when there is a reply to read."""
        return [] if self.gone else [self._control, *([self._output.descriptor] if self._output.is_open else [])]

    @property
    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        return self._output.last_words

    @property
    def exitcode(self) -> int | None:
        """The exit code of a Python that did not start; None if it started."""
        return self._process.returncode if self.pid is None else None

    @property
    def refusal(self) -> str | None:
        """Why the system refused to start it; None if it did not."""
        return os.strerror(errno.EAGAIN) if self.gone and self.exitcode == _UNFORKED else None

    def answers(self) -> bool:
        """Whether it is there and does its work: somebody may have killed or stopped it since the last run."""
        self._answered = False
        self._ask({"ask": "answer"})
        deadline = time.monotonic() + HELLO
        while not self._answered and not self.gone and time.monotonic() < deadline:
            wait(self.sources, HELLO)
            self.read_replies()
        return self._answered

    def begin(self, folder: str) -> None:
        """Prepare it for a run, whose folder it deletes if this process is killed."""
        self._ask({"ask": "begin", "folder": folder})

    def finish(self, folder: str) -> None:
        """Leave a run's folder to this process again."""
        self._ask({"ask": "finish", "folder": folder})

    def fork(self, start: dict[str, Any], streams: Sequence[int]) -> socket.socket:
        """Ask for a worker, which takes over `start` and gets the streams: reports, output, errors.

        Returns
        -------
        socket.socket
            A connection to the server for this worker alone.
        """
        channel, other = _socket_pair()
        with other, self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `read_replies` notices
            message = framed({"ask": "fork", "start": start})
            sent = socket.send_fds(self._control, [message], [other.fileno(), *streams], NO_SIGNAL)
            self._control.sendall(message[sent:], NO_SIGNAL)
        return channel

    def read_replies(self) -> None:
        """Take in what it has answered, without waiting."""
        with self.reading:
            if self.gone:
                return
            data, ended = read_available(self._control)
            self._take(data)
            self._output.relay()
            if ended:
                self._reap()

    def end(self) -> None:
        """End it, and with it all of its workers, at once."""
        with self.reading:
            if self.gone:
                return
            self._read_pid()
            self._control.shutdown(socket.SHUT_WR)  # it ends its workers, with all that they have started, and itself
            if not self.ready or not self._has_closed(_ENDING):
                self._kill()
            self._reap()

    def forget(self) -> None:
        """Close what this process has of it, which was forked: the server is its parent's."""
        self.gone = True
        self._resources.close()

    def _ask(self, request: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._control.sendall(framed(request), NO_SIGNAL)

    def _take(self, data: bytes) -> None:
        for header, _ in self._frames.feed(data):
            if "hello" in header:
                self.pid = header["hello"]
                self._process.wait()  # the process that was started has forked this one, and ended
            self.ready = self.ready or "ready" in header
            self._answered = self._answered or "answer" in header

    def _read_pid(self) -> None:
        """Learn the number of the process, if it is about to say it: the one that was started has ended."""
        if self.pid is None and self._process.poll() is not None and wait([self._control], HELLO):
            self._take(read_available(self._control)[0])

    def _has_closed(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while wait([self._control], max(0.0, deadline - time.monotonic())):
            if read_available(self._control)[1]:
                return True
        return False

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            if self.pid is not None:  # nobody else has the number: the process has not closed its end
                os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        self.gone = True
        if self.pid is None:  # it has closed its end without having begun
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(HELLO)
        self._output.relay()
        self._output.finish()
        self._resources.close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, clear of the standard streams."""
    ends = [end.detach() for end in socket.socketpair()]
    first, second = above_stdio(*ends)
    return socket.socket(fileno=first), socket.socket(fileno=second)


def _popen(origin: dict[str, Any], control: int, errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*origin["command"], "-c", BOOTSTRAP, str(control)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=origin["environ"],
        pass_fds=(control,),
        start_new_session=True,  # Ctrl-C is for rank 0
    )
