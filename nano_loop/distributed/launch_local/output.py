"""Relays processes' output to the caller's streams, line by line, prefixed by the rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from nano_loop.distributed.launch.failure import shortened

_LAST_WORDS = 4000  # characters kept for a message
_LONGEST_WORDS = 400  # per line there: faulthandler lists all extension modules at the end, in 10,000 characters
_LONGEST_LINE = 1 << 16  # bytes; longer lines are shown in pieces
_READ = 1 << 16  # bytes at a time
_STANDARD = 3  # lower descriptors are the standard streams, which C libraries write to by number


class Output:
    """One stream of another process, a non-blocking pipe, whose lines are shown on `stream`, if any, with a prefix."""

    def __init__(self, descriptor: int, stream: Any, prefix: str) -> None:
        self.descriptor = descriptor
        self.is_open = True
        self.last_words = ""
        self._stream = stream
        self._prefix = prefix
        self._line: list[bytes] = []  # pieces of the unfinished line
        self._length = 0

    def relay(self) -> None:
        """Show the lines received since the last call."""
        if not self.is_open:
            return
        with contextlib.suppress(BlockingIOError):  # no more data
            while data := os.read(self.descriptor, _READ):
                self._take(data)
            self.is_open = False
            self.finish()

    def finish(self) -> None:
        """Show the unfinished last line."""
        if self._line:
            self._take(b"\n")

    def _take(self, data: bytes) -> None:
        self._line.append(data)
        self._length += len(data)
        if b"\n" not in data and self._length < _LONGEST_LINE:
            return
        *lines, rest = b"".join(self._line).split(b"\n")
        if len(rest) >= _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._line, self._length = ([rest] if rest else []), len(rest)
        self._show("".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines))

    def _keep(self, text: str) -> None:
        """Keep the end of the output. Long lines are shortened, so that previous lines are kept."""
        lines = text[-_LONGEST_LINE:].splitlines(keepends=True)
        self.last_words = (self.last_words + "".join(shortened(line, _LONGEST_WORDS) for line in lines))[-_LAST_WORDS:]

    def _show(self, text: str) -> None:
        self._keep(text)
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except Exception:  # the caller's stream may be closed or a user's object: training must continue
            self._stream = None


@contextlib.contextmanager
def standard_streams_open() -> Iterator[None]:
    """Open placeholders for closed standard streams, so that no file gets their descriptors, and the output."""
    with contextlib.ExitStack() as stack:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STANDARD:
            stack.callback(os.close, descriptor)
        os.close(descriptor)
        yield


def pipe() -> tuple[int, int]:
    """Return a pipe whose read end is non-blocking."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return reading, writing
