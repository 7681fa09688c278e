"""Messages between rank 0 and the processes that it has started, on pipes and sockets: JSON, and bytes behind it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

_READ = 1 << 16  # bytes at a time


def framed(header: dict[str, Any], content: bytes = b"") -> bytes:
    """Return a message as it is sent: a line of JSON that says how many bytes of content follow."""
    return json.dumps({**header, "bytes": len(content)}).encode() + b"\n" + content


class Frames:
    """Takes messages apart that arrive in pieces; nothing in them is executed or unpickled."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._header: dict[str, Any] | None = None
        self._size = 0  # of what is in the pieces

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take in what has arrived, and yield each message that is complete: its header and its content."""
        self._pieces.append(data)
        self._size += len(data)
        while self._may_be_complete(data):
            rest = b"".join(self._pieces)
            if self._header is None:
                line, _, rest = rest.partition(b"\n")
                self._header = json.loads(line)
            length = self._header["bytes"]
            header, self._pieces, self._size, data = self._header, [rest], len(rest), rest
            if len(rest) < length:
                return
            self._header, self._pieces = None, [rest[length:]]
            self._size, data = len(rest) - length, rest[length:]
            yield header, rest[:length]

    def _may_be_complete(self, data: bytes) -> bool:
        return b"\n" in data if self._header is None else self._size >= self._header["bytes"]


def read_available(descriptor: int) -> tuple[bytes, bool]:
    """Return what a non-blocking descriptor holds, and whether its other end is closed."""
    pieces = []
    while True:
        try:
            pieces.append(os.read(descriptor, _READ))
        except BlockingIOError:
            return b"".join(pieces), False
        except ConnectionResetError:  # a socket whose other end was closed with something unread
            return b"".join(pieces), True
        if not pieces[-1]:
            return b"".join(pieces), True
