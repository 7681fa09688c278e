"""Messages between two processes over a stream socket, and a worker's reports about its task.

A message is a line of JSON, followed by the bytes of content that it announces. Nothing in it is executed or unpickled
before the sender is known.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import socket
import threading
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nano_loop.distributed.launch.failure import flush_output, pickled, raised
from nano_loop.patching.user_code import trim_tracebacks

_READ = 1 << 16  # bytes at a time
_ROOM = socket.CMSG_LEN(64 * array("i").itemsize)  # for descriptors, at a time
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # SIGPIPE could end the caller's process


class Stream:
    """One end of a blocking stream socket. Any thread may send; only one thread at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_open = True  # whether the other end can still send
        self.descriptors: list[int] = []  # received with messages; their owner removes them
        self._connection = connection
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self._connection.fileno()

    def send(self, kind: str, content: bytes = b"", *, descriptors: Sequence[int] = (), **header: Any) -> None:
        """Send a message; raise an OSError if either end is closed."""
        message = json.dumps({"kind": kind, **header, "bytes": len(content)}).encode() + b"\n" + content
        with self._sending:
            if descriptors:
                message = message[socket.send_fds(self._connection, [message], descriptors, _NO_SIGNAL) :]
            self._connection.sendall(message, _NO_SIGNAL)

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the available messages without waiting: each with its header, including the kind, and its content."""
        while self.is_open:
            try:
                # `socket.recv_fds` ignores its flags.
                data, extra, _, _ = self._connection.recvmsg(_READ, _ROOM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:  # the other end was closed with unread data
                data, extra = b"", []
            self.is_open = bool(data)
            self._received += data
            for _, _, numbers in extra:
                self.descriptors += array("i", numbers)
        while (end := self._received.find(b"\n")) >= 0:
            header = json.loads(self._received[:end])
            after = end + 1 + header["bytes"]
            if len(self._received) < after:
                return
            content = bytes(self._received[end + 1 : after])
            del self._received[:after]
            yield header, content

    def end(self) -> None:
        """Signal to the other end that nothing more will be sent."""
        self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; may be called repeatedly."""
        self.is_open = False
        self._connection.close()


class Reporter:
    """Sends a worker's reports: "ready" when it has read its payload, and at the end "finished" or "failed"."""

    def __init__(self, rank: int, send: Callable[..., object]) -> None:
        self.rank = rank
        self._send = send

    def report(self, kind: str, content: bytes = b"", **header: Any) -> None:
        """Send a report if rank 0 still exists."""
        with contextlib.suppress(OSError):
            self._send(kind, content, **header)

    def report_failure(self, error: BaseException, where: str) -> None:
        """Report the exception that ended the task, from its handler; see `failure.raised`."""
        # torch's handler raises if a loader's process has died, even during the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        trim_tracebacks(error)
        text = "".join(traceback.format_exception(error))
        failure = raised(self.rank, error, text, where)
        failure.pickled = pickled(error)
        flush_output()
        self.report("failed", pickle.dumps(failure))
