"""Read docs/faults.md, which lists the visible result of each fault: an error with its words, or a continued run."""

import re
import signal
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/faults.md"
_ROW = re.compile(r"\| (.+) \| (.+) \|")
_ERROR = re.compile(r"`(\w+)`(?: of rank (\d+))?(?:, exit code -?\d+)?(?:: (“.*”))?")
_TOLD = re.compile(
    r"rank (\d+) (?:raised (\w+)|ended its process with exit code (-?\d+)|called sys\.exit\((.+?)\)"
    r"|(?:was killed by|was ended by|crashed with) (SIG\w+))"
)


class Seen(NamedTuple):
    """The class of an error, its rank if the message does not name it, and the message's quoted parts, in order."""

    error: str
    rank: int | None
    words: tuple[str, ...]


class Told(NamedTuple):
    """The failed rank as the message describes it, which must match the error's attributes."""

    rank: int
    exitcode: int | None
    raised: str | None


def rows() -> dict[str, Seen | None]:
    """Return the expected error of each fault, or None if the run continues."""
    found = _ROW.findall(PAGE.read_text())
    return {_plain(what): _seen(result) for what, result in found if what not in ("fault", "---")}


def told(message: str) -> Told | None:
    """Parse a message, or return None if it does not begin with the event on a rank."""
    if (found := _TOLD.match(message)) is None:
        return None
    rank, raised, code, given, name = found.groups()
    if given is not None:
        code = given if given.isdigit() else 1  # Python's exit code for other values
    elif name is not None:
        code = -signal.Signals[name]
    return Told(int(rank), None if code is None else int(code), raised)


def _seen(result):
    if (error := _ERROR.fullmatch(result)) is None:
        return None
    name, rank, quoted = error.groups()
    words = re.findall("“(.*?)”(?: … |$)", quoted or "")
    return Seen(name, None if rank is None else int(rank), tuple(map(_plain, words)))


def _plain(text):
    return re.sub(r"\\([\\*_<>|\[\]])", r"\1", text)
