"""A handle on another process, whose number may be given to a third once it has ended."""

from __future__ import annotations

import os


def handle_of(process: int) -> int | None:
    """Return a descriptor that stands for a process, and is readable once that has ended.

    None where this system has none (Linux has, from 5.3 on, unless a sandbox forbids it), or the process has ended.
    """
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None
