"""Processes that a loop forks by itself: they end where the loop does, and leave the run to their parent."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forked_children_ending() -> Iterator[None]:
    """End a process that the body forks as it leaves the body. Else it would end the run and go on with the script."""
    process = os.getpid()
    code = 0
    try:
        yield
    except SystemExit as error:
        if os.getpid() == process:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # whatever it is, it is the child's own
        if os.getpid() == process:
            raise
        traceback.print_exc()
        code = 1
    if os.getpid() != process:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the loop may have closed or replaced it
                stream.flush()
        os._exit(code & 0xFF)
