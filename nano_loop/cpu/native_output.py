"""A filter for lines that native code writes to a process's output."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_one_at_a_time = threading.RLock()  # the process has only one such descriptor


@contextmanager
def without_lines(descriptor: int, part: bytes) -> Iterator[None]:
    """Buffer output to a descriptor of this process, and write it on exit without the lines that contain `part`."""
    with _one_at_a_time, ExitStack() as stack:
        held = None
        with suppress(OSError):  # there is no such descriptor, or no space for a file
            os.fstat(descriptor)  # the file would get the number of a closed one
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
