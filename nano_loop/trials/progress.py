"""Says how far a search is, on a terminal."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any


class Progress:
    """A bar on standard error, if that is a terminal and tqdm is installed.

    Parameters
    ----------
    seconds : float
        How long the search may take.
    """

    def __init__(self, seconds: float) -> None:
        self._bar: Any = None
        if sys.stderr is None or not sys.stderr.isatty():
            return
        with suppress(ImportError):
            form = "{desc} |{bar:20}| {n:.0f} of {total:.0f} s"
            self._bar = importlib.import_module("tqdm").tqdm(total=round(seconds), bar_format=form, leave=False)

    def at(self, seconds: float, what: str = "") -> None:
        """Show that so many seconds are over, and what is measured now."""
        if self._bar is not None:
            if what:
                self._bar.set_description_str(f"tune: {what}", refresh=False)
            self._bar.n = min(seconds, self._bar.total)
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
