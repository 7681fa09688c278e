"""A flag of each thread that is set in the body of a ``with`` statement, which may be nested."""

from __future__ import annotations

import threading


class ThreadDepth(threading.local):
    """Counts the bodies that this thread is in.

    Attributes
    ----------
    depth : int
        How many there are; 0 outside of all.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
