"""A filter for lines that compiled code writes into a process's output."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

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
        held = None
        with suppress(OSError):  # there is no such descriptor, or no place for a file
            os.fstat(descriptor)  # a closed one would be given to the file
            held = stack.enter_context(tempfile.TemporaryFile())
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
