"""What a run applied and what it skipped, for a person to read and for a program to check."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

_NAME_WIDTH = len("gradient_averaging")  # the longest name; a test compares it with all of them


@dataclass(frozen=True)
class StepResult:
    """What became of one step.

    Parameters
    ----------
    name : str
        The step's name, which is also its option's.
    status : {"applied", "skipped", "measured"}
        Whether it is in force, or that it is a measurement, made when the run ended.
    detail : str
        What was done, the reason why it was skipped, or what was measured.
    """

    name: str
    status: Literal["applied", "skipped", "measured"]
    detail: str

    def __str__(self) -> str:
        return f"  {self.status}  {self.name:<{_NAME_WIDTH}}  {self.detail}"


@dataclass(repr=False)
class SetupReport:
    """The report of one run.

    Parameters
    ----------
    title : str
        The version, the processes and threads, the CPUs and the processor, in one line.
    machine : dict
        What was read of the machine, as `nano_loop.cpu.Machine.as_dict` gives it.
    options : dict
        Every option as it was in force.
    from_environment : tuple of str
        Names of the environment variables that overrode the code.
    results : list of StepResult
        One for each step that was applied or skipped, in the order in which they ran, and for what was measured.
    """

    title: str
    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    from_environment: tuple[str, ...] = ()
    results: list[StepResult] = field(default_factory=list)

    @property
    def applied(self) -> tuple[str, ...]:
        """Names of the steps that are in force, each once."""
        return self._names("applied")

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the steps that were skipped, each once."""
        return self._names("skipped")

    def __getitem__(self, name: str) -> StepResult:
        """Return the last result of the step called `name`; ``KeyError`` where the step was off."""
        for result in reversed(self.results):
            if result.name == name:
                return result
        raise KeyError(name)

    def add(self, results: list[StepResult]) -> list[StepResult]:
        """Take in the results of one more ``setup``, and return those that say something new."""
        new = [result for result in results if result not in self.results]
        self.results.extend(new)
        return new

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers, which JSON can hold."""
        return {
            "title": self.title,
            "machine": copy.deepcopy(self.machine),
            "options": copy.deepcopy(self.options),
            "from_environment": list(self.from_environment),
            "results": [vars(result).copy() for result in self.results],
        }

    def __str__(self) -> str:
        lines = [self.title]
        if self.from_environment:
            lines.append(f"  from the environment: {', '.join(self.from_environment)}")
        return "\n".join([*lines, *map(str, self.results)])

    __repr__ = __str__  # what a notebook shows

    def _names(self, status: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.name for result in self.results if result.status == status))
