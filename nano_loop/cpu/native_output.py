"""A filter for lines that compiled code writes by itself into a process's output."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

_one_at_a_time = threading.RLock()  # the descriptor is the process's


@contextmanager
def without_lines(descriptor: int, part: bytes) -> Iterator[None]:
    """Hold back what is written to a file descriptor, and then let it go without the lines that contain `part`.

    Parameters
    ----------
    descriptor : int
        1 for standard output, or 2 for standard error. It is changed for all threads, so the body should be short.
    part : bytes
        What the unwanted lines contain.
    """
    with _one_at_a_time, ExitStack() as stack:
        held = _holding_file(descriptor, stack)
        if held is None:
            yield
            return
        output = os.dup(descriptor)
        os.dup2(held.fileno(), descriptor)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(output, descriptor)
            os.close(output)
            held.seek(0)
            rest = b"".join(line for line in held if part not in line)
            while rest:
                rest = rest[os.write(descriptor, rest) :]


def _holding_file(descriptor: int, stack: ExitStack) -> IO[bytes] | None:
    """Return a file to hold lines, or None if there is no such descriptor, or no place for a file."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        os.fstat(descriptor)  # a closed one would be given to the file
        return stack.enter_context(tempfile.TemporaryFile())
    except OSError:
        return None
