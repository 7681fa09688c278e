"""A row of the table of faults: the fault and its limits. docs/faults.md has its visible result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Nothing may be left behind after a fault, and the process must train again at once; rows do not repeat this.
    """

    what: str  # the event as a noun clause; the row's name here and on the page
    commit: Callable[[], object]  # commits the fault: raises the user's exception, or returns if training continues
    seconds: float = 10.0  # limit for the whole fault, from the call to the error
    begins: bool = False  # whether this includes the start of Python and the import of torch, slow on a busy machine
    travels: bool = True  # whether the worker's exception is the cause of the error; False if it cannot be sent
    leaves: tuple[str, ...] = ()  # prefixes of `verdict`'s descriptions of what one process would leave as well
    apart: bool = False  # whether it needs a dedicated process
    as_root: bool = False  # whether only root can cause it
    quick: bool = False  # whether it is part of ``make test``

    @property
    def name(self) -> str:
        """The row's name, usable on a command line."""
        return re.sub(r"[^a-z0-9]+", "-", self.what.lower()).strip("-")
