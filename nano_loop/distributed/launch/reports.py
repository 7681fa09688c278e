"""The reports of a worker to rank 0, on a pipe: messages, and what both ends do with them.

A worker reports "ready" when it has read its payload, and at the end "finished", or "failed" and then "exception": the
words of a failure at once, since pickling an exception may fail or take long. Nothing in a message is executed or
unpickled before it is known who has sent it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from nano_loop.distributed.launch.failure import Failure, flush_output, pickled, raised
from nano_loop.distributed.launch.workers import Worker
from nano_loop.patching.user_code import users_traceback

#: Requests about a worker: its end, and its stack.
KILL, DUMP = b"k", b"d"
#: The exit code of a worker that has returned from the loop, and cannot say so.
CUT_OFF = 113
_READ = 1 << 16  # bytes at a time
_EXCEPTION = 1.0  # seconds that a failure waits for the exception itself
_PATIENCE = 1.0  # seconds from a worker's last word to the news of its end; an echo waits longer


def framed(header: dict[str, Any], content: bytes = b"") -> bytes:
    """Return a message as it is sent: a line of JSON that says how many bytes of content follow."""
    return json.dumps({**header, "bytes": len(content)}).encode() + b"\n" + content


class Frames:
    """Takes messages apart that arrive in pieces; nothing in them is executed or unpickled."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take in what has arrived, and yield each message that is complete: its header and its content."""
        self._buffer += data
        while True:
            if self._header is None:
                end = self._buffer.find(b"\n")
                if end < 0:
                    return
                self._header = json.loads(self._buffer[:end])
                del self._buffer[: end + 1]
            header, size = self._header, self._header["bytes"]
            if len(self._buffer) < size:
                return
            content = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._header = None
            yield header, content


def read_available(source: int | socket.socket) -> tuple[bytes, bool]:
    """Return what a non-blocking descriptor, or any socket, holds, and whether its other end is closed."""
    pieces = []
    while True:
        try:
            if isinstance(source, int):
                pieces.append(os.read(source, _READ))
            else:
                pieces.append(source.recv(_READ, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return b"".join(pieces), False
        except OSError:  # a socket whose other end was closed with something unread, or whose host is silent
            return b"".join(pieces), True
        if not pieces[-1]:
            return b"".join(pieces), True


class Reporter:
    """A worker's end.

    Parameters
    ----------
    rank : int
        The worker's rank.
    write : callable
        Sends bytes, all of them.
    """

    def __init__(self, rank: int, write: Callable[[bytes], object]) -> None:
        self.rank = rank
        self._write = write
        #: Whether a report could not be sent: rank 0 is gone, or the loop has closed what it did not open.
        self.is_cut_off = False

    def report(self, kind: str, content: bytes = b"", **header: Any) -> None:
        """Send a report, if rank 0 is still there."""
        try:
            self._write(framed({"kind": kind, **header}, content))
        except OSError:
            self.is_cut_off = True

    def report_failure(self, error: BaseException, where: str) -> None:
        """Report the exception that has ended the task, in its handler; see `failure.raised`."""
        # torch's handler raises where a loader's process has died, also in the midst of the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        text = "".join(traceback.format_exception(type(error), error, users_traceback(error.__traceback__)))
        self.report("failed", failure=raised(self.rank, error, text, where).in_words())
        flush_output()
        self.report("exception", pickled(error))


class ReportingWorker(Worker):
    """A `Worker` that rank 0 sees by its reports.

    Parameters
    ----------
    rank : int
        Its rank.

    Attributes
    ----------
    reports : int or None
        The non-blocking descriptor of rank 0's end; None once the other end is closed.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.reports: int | None = None
        self._reading = threading.RLock()
        self._frames = Frames()
        self._failure: Failure | None = None
        self._failed_at = 0.0
        self._silent_since: float | None = None

    @property
    @override
    def sources(self) -> Sequence[Any]:
        return [] if self.reports is None else [self.reports]

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the process has ended, or will never begin."""

    @abstractmethod
    def death(self) -> Failure:
        """Return the failure of a process that has ended without a report."""

    @abstractmethod
    def silence(self) -> Failure:
        """Return the failure of a process that can no longer report, though it has not ended as far as is known."""

    @override
    def poll(self) -> Failure | None:
        ended = self.has_ended()  # asked first: what has been reported then is all that there will be
        self.read_reports()
        if self._failure is not None:
            waits = self.reports is not None and time.monotonic() < self._failed_at + _EXCEPTION
            return None if waits else self._failure
        if self.finished:
            return None
        if ended:
            return self.death()
        if self.reports is None:
            self._silent_since = self._silent_since or time.monotonic()
            return self.silence() if time.monotonic() > self._silent_since + _PATIENCE else None
        return None

    def read_reports(self) -> None:
        """Take in what the process has reported, without waiting."""
        with self._reading:
            if self.reports is None:
                return
            data, ended = read_available(self.reports)
            for header, content in self._frames.feed(data):
                self._take(header, content)
            if ended:
                self.reports = None

    def _take(self, header: dict[str, Any], content: bytes) -> None:
        kind = header["kind"]
        self.ready = self.ready or kind == "ready"
        self.finished = self.finished or kind == "finished"
        if kind == "failed":
            self._failure = Failure.of_words(header["failure"])
            self._failed_at = time.monotonic()
        elif kind == "exception":
            assert self._failure is not None
            self._failure.pickled = content
            self._failed_at = 0.0  # complete
