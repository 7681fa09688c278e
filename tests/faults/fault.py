"""What a row of the table of faults says: what happens, when, what the user sees, and what it may take."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from nano_loop import NanoWorkerError

BEFORE = "before the start"
STARTING = "while workers start"
JOINING = "between ready and the first exchange"
FIRST = "in the first step"
EPOCH = "in the midst of an epoch"
COLLECTIVE = "in a collective"
LAST = "in the last step"
AFTER = "after the loop"
ENDING = "while the run is cleaned up"
_TOLD = re.compile(
    r"rank (\d+) (?:raised (\w+)|ended its process with exit code (-?\d+)|called sys\.exit\((.+?)\)"
    r"|(?:was killed by|was ended by|crashed with) (SIG\w+))"
)


class Told(NamedTuple):
    """What a message says of the rank that has failed: the error has the same."""

    rank: int
    exitcode: int | None
    raised: str | None

    @classmethod
    def by(cls, message: str) -> Told | None:
        """Return what a message says, or None where it does not begin with what a rank has done."""
        if (found := _TOLD.match(message)) is None:
            return None
        rank, raised, code, given, name = found.groups()
        if given is not None:
            code = given if given.isdigit() else 1  # as Python does
        elif name is not None:
            code = -signal.Signals[name]
        return cls(int(rank), None if code is None else int(code), raised)


PHASES = (BEFORE, STARTING, JOINING, FIRST, EPOCH, COLLECTIVE, LAST, AFTER, ENDING)


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    After each, nothing is left behind and the process trains again at once, so no row says that.

    Parameters
    ----------
    what : str
        What happens, as a noun clause; the row's name.
    when : str
        One of `PHASES`.
    commit : callable
        Does it: raises what the user sees, or returns where training goes on.
    sees : type or None
        What is raised; None for a run that ends as usual.
    words : tuple of str
        Parts of the message, in this order.
    rank : int or None
        Of the `NanoWorkerError`. None for the one that the words say, or any; so are its exit code and its cause.
    travels : bool
        Whether the exception that a worker raises is the cause of the error; not if it cannot be sent.
    seconds : float
        How long all of it may take, from the call to the error.
    begins : bool
        Whether Python is started and imports torch in that time, which takes long where a machine is busy.
    leaves : tuple of str
        What it leaves behind, which one process would leave as well: beginnings of `verdict`'s words.
    apart : bool
        Whether it takes a process that does nothing else.
    as_root : bool
        Whether only root can bring it about.
    quick : bool
        Whether it is in ``make test``.
    result : str
        What the table says where no error is seen.
    """

    what: str
    when: str
    commit: Callable[[], object]
    sees: type[BaseException] | None = NanoWorkerError
    words: tuple[str, ...] = ()
    rank: int | None = None
    travels: bool = True
    seconds: float = 10.0
    begins: bool = False
    leaves: tuple[str, ...] = ()
    apart: bool = False
    as_root: bool = False
    quick: bool = False
    result: str = "training goes on"

    @property
    def name(self) -> str:
        """The row's name as a command line can hold it."""
        return re.sub(r"[^a-z0-9]+", "-", self.what.lower()).strip("-")
