"""Messages between rank 0 and the processes that it has started, on pipes and sockets: JSON, and bytes behind it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

#: The two requests about a worker to the process that has forked it.
KILL, DUMP = b"k", b"d"
_READ = 1 << 16  # bytes at a time


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
        searched = len(self._buffer)
        self._buffer += data
        while True:
            if self._header is None:
                end = self._buffer.find(b"\n", searched)
                if end < 0:
                    return
                self._header = json.loads(self._buffer[:end])
                del self._buffer[: end + 1]
            header, size, searched = self._header, self._header["bytes"], 0
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
        except ConnectionResetError:  # a socket whose other end was closed with something unread
            return b"".join(pieces), True
        if not pieces[-1]:
            return b"".join(pieces), True
