"""A per-thread flag that is set in the body of a ``with`` statement, which may be nested."""

from __future__ import annotations

import threading


class ThreadDepth(threading.local):
    """Counts the nested bodies that this thread is in.

    Attributes
    ----------
    depth : int
        The nesting depth; 0 outside of all bodies.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
