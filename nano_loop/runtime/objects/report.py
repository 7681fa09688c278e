"""The data of a report: the steps that a run applied and skipped, with reasons, and their text."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from nano_loop.errors import error_message

_NAME_WIDTH = len("gradient_averaging")  # the longest name; a test checks this
_DIGITS = 3  # digits of a time


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Parameters
    ----------
    name : str
        The name of the step, which is also the name of its option.
    status : {"applied", "skipped", "measured"}
        Whether the step was applied or skipped. "measured" marks a measurement that was made at the end of the run.
    detail : str
        What the step changed, why it was skipped, or what was measured.
    code : str or None
        Why it was skipped, as a short, stable identifier such as "no_norm".
    idle : str
        The line that lists the step together with others, such as "nothing to do". Empty: the step has a separate
        line, for example because the user has set the option.
    data : object
        A full measurement, such as a `Verification` or a `CastLog`, which prints as a table and has `as_dict`. None for
        most steps.
    """

    name: str
    status: Literal["applied", "skipped", "measured"]
    detail: str
    data: Any = field(default=None, compare=False)
    code: str | None = None
    idle: str = field(default="", compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain dicts, lists, strings and numbers, for JSON."""
        result = {"name": self.name, "status": self.status, "detail": self.detail}
        result |= {} if self.code is None else {"code": self.code}
        return result if self.data is None else {**result, "data": self.data.as_dict()}

    def __str__(self) -> str:
        return f"  {self.status}  {self.name:<{_NAME_WIDTH}}  {self.detail}"


class ReportPrinter:
    """Prints the report of a run, except for lines that the previous run `printed` in the same place."""

    def __init__(self, printed: list[str]) -> None:
        self._printed = printed
        self._lines: list[str] = []
        self._differs = False

    def print(self, entries: Sequence[SetupReport | StepResult]) -> None:
        """Print the entries, unless the previous run printed them and all entries before them."""
        place = len(self._lines)
        self._lines += map(_without_measurement, entries)
        self._differs = self._differs or self._printed[place : len(self._lines)] != self._lines[place:]
        if self._differs:
            print_lines(_lines_of(entries))
            self._printed[:] = self._lines


def duration(seconds: float) -> str:
    """Return a time with three digits and a unit: ``8.41 ms``, ``1.20 s``."""
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(seconds * 1e3)} ms"


def digits(number: float) -> str:
    """Return a number with three digits, or more before the decimal point: ``8.41``, ``2,031``."""
    places = _DIGITS if number <= 0 else _DIGITS - 1 - math.floor(math.log10(number))
    return f"{number:,.{max(places, 0)}f}"


def size(count: float) -> str:
    """Return a number of bytes with a unit: ``5.9 GB``, ``12.0 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def print_lines(lines: Iterable[object]) -> None:
    """Print lines as one write to standard error, or to standard output in a notebook, which shows errors in red."""
    is_notebook = type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
    stream = sys.stdout if is_notebook else sys.stderr
    if stream is not None:  # None in a program without a console
        with suppress(Exception):  # it may be closed or be the user's object: training continues
            text = "".join(f"{line}\n" for line in lines)  # one write, so that workers' lines cannot interleave
            print(text, end="", file=stream, flush=True)


def _lines_of(entries: Iterable[SetupReport | StepResult]) -> Iterator[str]:
    """Yield the lines of entries, with one line for all steps skipped for the same reason or with nothing to do."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if isinstance(entry, SetupReport) or entry.status != "skipped":
            lines[(str(entry),)] = []
        elif entry.idle:
            lines.setdefault((entry.idle,), []).append(entry.name)
        else:
            lines.setdefault((entry.status, entry.detail), []).append(entry.name)
    for (first, *rest), names in lines.items():
        listed = ", ".join(dict.fromkeys(names))
        if rest:
            yield f"  {first}  {listed:<{_NAME_WIDTH}}  {rest[0]}"
        else:
            yield f"  {first}: {listed}" if names else first


def _without_measurement(entry: SetupReport | StepResult) -> str:
    """Return an entry as text without its measurement, which varies between runs."""
    measured = isinstance(entry, StepResult) and entry.status == "measured"
    return f"{entry.status} {entry.name}" if measured else str(entry)  # type: ignore[union-attr]


@dataclass(repr=False)
class SetupReport:
    """The report of one run.

    Parameters
    ----------
    title : str
        The version, the processes and threads, the CPUs and the processor, in one line.
    machine : dict
        The description of the machine, as returned by `nano_loop.cpu.Machine.as_dict`.
    options : dict
        Every option with the value that the run used.
    from_environment : tuple of str
        The environment variables that overrode arguments.
    results : list of StepResult
        One result for each step that was applied or skipped, in the order of execution, and one for each measurement.
    """

    title: str
    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    from_environment: tuple[str, ...] = ()
    results: list[StepResult] = field(default_factory=list)

    @property
    def applied(self) -> tuple[str, ...]:
        """Names of the steps that were applied, without duplicates."""
        return tuple(dict.fromkeys(result.name for result in self.results if result.status == "applied"))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the steps that were skipped and never applied, without duplicates."""
        applied = self.applied
        skipped = [result for result in self.results if result.status == "skipped"]
        return tuple(dict.fromkeys(r.name for r in skipped if not (r.idle and r.name in applied)))

    def __getitem__(self, name: str) -> StepResult:
        """Return the last result of the step `name`. Raises ``KeyError`` if there is none, as of a disabled step."""
        for result in reversed(self.results):
            if result.name == name:
                return result
        names = ", ".join(sorted({result.name for result in self.results}))
        raise KeyError(error_message(f"report[{name!r}]", f"this report has {names}", "Use one of these names"))

    def add(self, results: list[StepResult]) -> list[StepResult]:
        """Add the results of a ``setup`` call, and return those that are not in the report yet."""
        new = [result for result in results if result not in self.results]
        self.results.extend(new)
        return new

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers, for JSON."""
        return {
            "title": self.title,
            "machine": copy.deepcopy(self.machine),
            "options": copy.deepcopy(self.options),
            "from_environment": list(self.from_environment),
            "results": [result.as_dict() for result in self.results],
        }

    def __str__(self) -> str:
        lines = [self.title]
        if self.from_environment:
            lines.append(f"  from the environment: {', '.join(self.from_environment)}")
        applied = self.applied
        results = [result for result in self.results if not (result.idle and result.name in applied)]
        return "\n".join([*lines, *_lines_of(results)])

    __repr__ = __str__  # notebooks show the repr
