"""The caller's side of the process that workers are forked from: it starts it, asks it for workers, and ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from nano_loop.distributed.launch.local import whereabouts
from nano_loop.distributed.launch.local.frames import Frames, framed
from nano_loop.distributed.launch.local.handle import handle_of
from nano_loop.distributed.launch.local.output import STANDARD, Output, pipe
from nano_loop.distributed.launch.local.start import UNFORKED, Origin, modules_to_import

_HELLO = 1.0  # seconds in which a process that is there answers
_STOPPED = ("T", "t")  # states of a process, as in /proc
_ENDING = 2.0  # seconds that its workers may take to end


class Server:
    """A process of `nano_loop.distributed.launch.local.fork_server`.

    Its answers are taken in by `pump`, in one thread at a time; requests may come from any thread.

    Parameters
    ----------
    origin : Origin
        What it is started with.
    cpus : list of int
        Where it imports; empty for no binding.
    folder : str or None
        The temporary folder while it imports; None for the system's.
    idle : float
        Seconds without a run after which the process ends.
    modules : sequence of str
        What it imports besides torch and nano_loop.
    """

    def __init__(
        self, origin: Origin, cpus: list[int], folder: str | None, idle: float, modules: Sequence[str] = ()
    ) -> None:
        self.origin = origin
        self.owner = os.getpid()
        self.ready = self.gone = self._answered = False
        self.pid: int | None = None  # known once it has begun
        self._handle: int | None = None
        self._frames = Frames()
        self._sending, self._pumping = threading.Lock(), threading.Lock()
        self._tokens = 0
        self._codes: dict[int, int] = {}
        self._refusals: dict[int, str] = {}
        self._states: dict[int, str] = {}  # of workers that were to write down where they are
        with contextlib.ExitStack() as stack:
            self._control, theirs = _socket_pair()
            stack.callback(self._control.close)
            with theirs:
                reading, writing = pipe()
                stack.callback(os.close, reading)
                try:
                    self._process = _popen(origin, theirs.fileno(), writing)
                finally:
                    os.close(writing)
            self._closing = stack.pop_all()
        self._output = Output(reading, sys.stderr, "[workers] ")
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is seen soon enough
            assert self._process.stdin is not None
            self._process.stdin.write(origin.as_line(cpus, folder, idle, modules))
            self._process.stdin.close()

    @property
    def sources(self) -> Sequence[Any]:
        """What is readable when there is something to pump."""
        return [] if self.gone else [self._control, *([self._output.descriptor] if self._output.is_open else [])]

    @property
    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        return self._output.last_words

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that it takes in this process."""
        mine = (self._control.fileno(), self._output.descriptor, self._handle)
        return [] if self.gone else [each for each in mine if each is not None]

    def answers(self) -> bool:
        """Whether it is there and does its work: somebody may have killed or stopped it since the last run."""
        self._answered = False
        self._ask({"ask": "answer"})
        deadline = time.monotonic() + _HELLO
        while not self._answered and not self.gone and time.monotonic() < deadline:
            wait(self.sources, _HELLO)
            self.pump()
        return self._answered

    def begin(self, folder: str) -> None:
        """Prepare it for a run, whose folder it deletes if this process is killed."""
        self._ask({"ask": "begin", "folder": folder, "modules": modules_to_import()})

    def finish(self, folder: str) -> None:
        """Leave a run's folder to this process again."""
        self._ask({"ask": "finish", "folder": folder})

    def fork(self, start: str, streams: Sequence[int], again: bool = True) -> int:
        """Ask for a worker, which gets `streams`, and return the token that it is known by.

        Another one is forked ahead when it ends, if such a worker may be needed `again`.
        """
        with self._sending:
            self._tokens += 1
            message = framed({"ask": "fork", "token": self._tokens, "start": start, "again": again})
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone, which `pump` notices
                socket.send_fds(self._control, [message], streams)
            return self._tokens

    def kill(self, token: int) -> None:
        """Kill a worker and all that it has started, also one that has ended already."""
        if not self.ready:
            self.end()  # it imports, and would fork the worker first
        elif not self.ended(token):
            self._ask({"ask": "kill", "token": token})

    def whereabouts(self, token: int, folder: str, rank: int) -> str:
        """Have a worker write down where it is, and return that; what stops it where it is stopped."""
        self._ask({"ask": "show", "token": token})
        deadline = time.monotonic() + _HELLO
        while token not in self._states and not self.ended(token) and time.monotonic() < deadline:
            wait(self.sources, 0.02)
            self.pump()
        if self._states.pop(token, "") in _STOPPED:
            return "it is stopped, by SIGSTOP or a debugger; kill -CONT makes it go on"
        return whereabouts.read(folder, rank, deadline)

    def pump(self) -> None:
        """Take in what it has answered, without waiting."""
        with self._pumping:
            if self.gone:
                return
            data, ended = _received(self._control)
            for header, _ in self._frames.feed(data):
                self._take(header)
            self._output.relay()
            if ended:
                self._bury()

    def ended(self, token: int) -> bool:
        """Whether a worker has ended, or will never begin."""
        return self.gone or token in self._codes or token in self._refusals

    def exitcode(self, token: int) -> int | None:
        """Return the exit code of a worker that has ended, negative for a signal; None if nobody knows it."""
        if token in self._codes or self.pid is not None:
            return self._codes.get(token)
        return self._process.returncode  # of a Python that did not start

    def refusal(self, token: int) -> str | None:
        """Return why the system refused to fork a worker; None if it did not."""
        if self.pid is None and self.gone and self._process.returncode == UNFORKED:
            return os.strerror(errno.EAGAIN)
        return self._refusals.get(token)

    def wait_for(self, token: int, timeout: float) -> None:
        """Wait until a worker that was killed has ended; end the server if that takes too long."""
        began = time.monotonic()
        while not self.ended(token):
            waited = time.monotonic() - began
            if waited > timeout or (waited > _HELLO and not self.answers()):
                self.end()
                return
            wait(self.sources, 0.1)
            self.pump()

    def end(self) -> None:
        """End it, and with it all of its workers, at once."""
        with self._pumping:
            if self.gone:
                return
            self._meet()
            self._control.shutdown(socket.SHUT_WR)  # it ends its workers, with all that they have started, and itself
            if not self.ready or not self._has_closed(_ENDING):
                self._kill()
            self._bury()

    def _ask(self, request: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError, OSError):
            self._control.sendall(framed(request))

    def _take(self, header: dict[str, Any]) -> None:
        if "hello" in header:
            self.pid = header["hello"]
            self._handle = handle_of(self.pid)
            self._process.wait()  # the process that was started has forked this one, and ended
        elif "exited" in header:
            self._codes[header["exited"]] = header["code"]
        elif "shown" in header:
            self._states[header["shown"]] = header["state"]
        elif "unforked" in header:
            self._refusals[header["unforked"]] = header["why"]
        self.ready = self.ready or "ready" in header
        self._answered = self._answered or "answer" in header

    def _meet(self) -> None:
        """Learn the number of the process, if it is about to say it: the one that was started has ended."""
        if self.pid is None and self._process.poll() is not None and wait([self._control], _HELLO):
            for header, _ in self._frames.feed(_received(self._control)[0]):
                self._take(header)

    def _has_closed(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while wait([self._control], max(0.0, deadline - time.monotonic())):
            if _received(self._control)[1]:
                return True
        return False

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)

    def _bury(self) -> None:
        self.gone = True
        if self.pid is None:  # it has closed its end without having begun
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_HELLO)
        self._output.relay()
        self._output.finish()
        self._closing.close()
        if self._handle is not None:
            os.close(self._handle)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, clear of the standard streams, which a caller may have closed."""
    first, second = socket.socketpair()
    with first, second, contextlib.ExitStack() as undoing:
        ours = undoing.enter_context(_moved(first))
        theirs = undoing.enter_context(_moved(second))
        undoing.pop_all()
    return ours, theirs


def _moved(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, STANDARD))


def _popen(origin: Origin, control: int, errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*origin.command, str(control)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=dict(origin.environ),
        pass_fds=(control,),
        start_new_session=True,  # Ctrl-C is for rank 0
    )


def _received(control: socket.socket) -> tuple[bytes, bool]:
    """Return what has come, without waiting, and whether the other end is closed."""
    pieces = []
    while True:
        try:
            pieces.append(control.recv(1 << 16, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return b"".join(pieces), False
        except ConnectionResetError:  # it was closed with something unread
            return b"".join(pieces), True
        if not pieces[-1]:
            return b"".join(pieces), True
