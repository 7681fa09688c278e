"""Keeps gloo's greeting out of what the user's script prints."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from nano_loop.distributed.launch.torch_version import is_older_than


@contextmanager
def without_greeting() -> Iterator[None]:
    """Hold standard output back, and then let it go without the line in which gloo says that it is connected.

    The gloo in torch 2.8 prints it to standard output from C++, always; later ones have ``GLOO_LOG_LEVEL`` for it
    (pytorch/gloo#467), which leaves it out unless asked.
    """
    if not _greets() or not sys.platform.startswith("linux"):
        yield
        return
    try:
        output = os.dup(1)
    except OSError:  # there is none
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(output, 1)
            os.close(output)
            held.seek(0)
            rest = b"".join(line for line in held if not line.startswith(b"[Gloo] "))
            while rest:
                rest = rest[os.write(1, rest) :]


def _greets() -> bool:
    return is_older_than(2, 13)
