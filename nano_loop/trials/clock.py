"""The time that a search has."""

from __future__ import annotations

import time


class Clock:
    """Begins when it is made.

    Parameters
    ----------
    seconds : float
        How long the search may take, about.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """The seconds since the begin."""
        return time.monotonic() - self._began

    @property
    def until(self) -> float:
        """The end, as `time.monotonic` counts."""
        return self._began + self.seconds

    @property
    def left(self) -> float:
        """The seconds to the end; less than 0 after it."""
        return self.until - time.monotonic()
