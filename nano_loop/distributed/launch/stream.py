"""Messages between two processes over a stream socket, and what a worker says of its task.

A message is a line of JSON, and the bytes of content that it announces. Nothing in it is executed or unpickled before
it is known who has sent it.
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
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # SIGPIPE may end the caller's process


class Stream:
    """One end of a stream socket. Messages may be sent in any thread, and are received in one at a time.

    Parameters
    ----------
    connection : socket.socket
        The end, blocking.

    Attributes
    ----------
    is_open : bool
        Whether more can come from the other end.
    descriptors : list of int
        Those that have come with messages; their owner takes them out.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.is_open = True
        self.descriptors: list[int] = []
        self._connection = connection
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for what waits until there is a message."""
        return self._connection.fileno()

    def send(self, kind: str, content: bytes = b"", *, descriptors: Sequence[int] = (), **header: Any) -> None:
        """Send a message; raise an OSError where the other end, or this one, is closed."""
        message = json.dumps({"kind": kind, **header, "bytes": len(content)}).encode() + b"\n" + content
        with self._sending:
            if descriptors:
                message = message[socket.send_fds(self._connection, [message], descriptors, _NO_SIGNAL) :]
            self._connection.sendall(message, _NO_SIGNAL)

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the messages that have come, without waiting: each with its kind in the header, and its content."""
        while self.is_open:
            try:
                # Not `socket.recv_fds`, which leaves its flags out.
                data, extra, _, _ = self._connection.recvmsg(_READ, _ROOM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:  # the other end was closed with something unread
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
        """Let the other end know that nothing more comes from this one."""
        self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; also once more."""
        self.is_open = False
        self._connection.close()


class Reporter:
    """What a worker says of its task: "ready" when it has read its payload, and at the end "finished" or "failed".

    Parameters
    ----------
    rank : int
        The worker's rank.
    send : callable
        See `Stream.send`.
    """

    def __init__(self, rank: int, send: Callable[..., object]) -> None:
        self.rank = rank
        self._send = send

    def report(self, kind: str, content: bytes = b"", **header: Any) -> None:
        """Send a report, if rank 0 is still there."""
        with contextlib.suppress(OSError):
            self._send(kind, content, **header)

    def report_failure(self, error: BaseException, where: str) -> None:
        """Report the exception that has ended the task, in its handler; see `failure.raised`."""
        # torch's handler raises where a loader's process has died, also in the midst of the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        trim_tracebacks(error)
        text = "".join(traceback.format_exception(error))
        failure = raised(self.rank, error, text, where)
        failure.pickled = pickled(error)
        flush_output()
        self.report("failed", pickle.dumps(failure))
