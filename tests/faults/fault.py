"""A row of the table of faults: the fault and its limits. docs/faults.md has its visible result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Nothing may be left behind after a fault, and the process must train again at once; rows do not repeat this.

    Parameters
    ----------
    what : str
        The event as a noun clause; the row's name here and on the page.
    commit : callable
        Commits the fault: raises the user's exception, or returns if training continues.
    seconds : float
        Limit for the whole fault, from the call to the error.
    begins : bool
        Whether this includes the start of Python and the import of torch, which takes long on a busy machine.
    travels : bool
        Whether the worker's exception is the cause of the error; False if it cannot be sent.
    leaves : tuple of str
        Leftovers that one process would leave as well: prefixes of `verdict`'s descriptions.
    apart : bool
        Whether it needs a dedicated process.
    as_root : bool
        Whether only root can cause it.
    quick : bool
        Whether it is part of ``make test``.
    """

    what: str
    commit: Callable[[], object]
    seconds: float = 10.0
    begins: bool = False
    travels: bool = True
    leaves: tuple[str, ...] = ()
    apart: bool = False
    as_root: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """The row's name, usable on a command line."""
        return re.sub(r"[^a-z0-9]+", "-", self.what.lower()).strip("-")
