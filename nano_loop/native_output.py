"""Keeps lines that compiled code writes by itself out of a process's output."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


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
    try:
        output = os.dup(descriptor) if sys.platform.startswith("linux") else None
    except OSError:  # there is none
        output = None
    if output is None:
        yield
        return
    with tempfile.TemporaryFile() as held:
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
