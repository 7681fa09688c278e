"""What a row of the table of faults says: what happens, and what it may take. The page says what is seen of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    After each, nothing is left behind and the process trains again at once, so no row says that.

    Parameters
    ----------
    what : str
        What happens, as a noun clause; the row's name here and on the page.
    commit : callable
        Does it: raises what the user sees, or returns where training goes on.
    seconds : float
        How long all of it may take, from the call to the error.
    begins : bool
        Whether Python is started and imports torch in that time, which takes long where a machine is busy.
    travels : bool
        Whether the exception that a worker raises is the cause of the error; not if it cannot be sent.
    leaves : tuple of str
        What it leaves behind, which one process would leave as well: beginnings of `verdict`'s words.
    apart : bool
        Whether it takes a process that does nothing else.
    as_root : bool
        Whether only root can bring it about.
    quick : bool
        Whether it is in ``make test``.
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
        """The row's name as a command line can hold it."""
        return re.sub(r"[^a-z0-9]+", "-", self.what.lower()).strip("-")
