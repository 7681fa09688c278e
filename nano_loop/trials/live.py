"""A trial as the caller sees it: its processes, the times of its steps, and what has become of it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_loop.distributed.launch.local.server import Server
from nano_loop.distributed.launch.local.throwaway import Throwaway, TrialFailedError
from nano_loop.errors import NanoError
from nano_loop.settings import Settings
from nano_loop.trials.trial import Trial

#: A step of a turn that takes so many times the median is no step alone: an evaluation, or a checkpoint.
_BETWEEN_EPOCHS = 20.0


@dataclass(eq=False)
class Measured:
    """A candidate, and what was measured of it.

    Attributes
    ----------
    changes : dict
        The options of the candidate, besides those that all candidates have.
    is_plain : bool
        Whether it is the loop without nano_loop.
    seconds : list of float
        The time of a step for one batch, turn by turn.
    speed : float or None
        How many times as fast as the first candidate of the search.
    memory : int or None
        The most memory that its processes have had together, in bytes.
    note : str
        Why it was measured no further, or failed.
    steps : dict
        The status and the detail of each step of its report.
    comparison : dict or None
        What `verify` has found of its numbers.
    """

    changes: dict[str, Any]
    is_plain: bool = False
    seconds: list[float] = field(default_factory=list)
    speed: float | None = None
    memory: int | None = None
    note: str = ""
    steps: dict[str, list[str]] = field(default_factory=dict)
    comparison: dict[str, Any] | None = None

    @property
    def median(self) -> float | None:
        """The median time of a step for one batch, in seconds."""
        return statistics.median(self.seconds) if self.seconds else None


class LiveTrial:
    """The processes of one trial. They begin with their first steps at once.

    Parameters
    ----------
    measured : Measured
        The candidate, which notes what is found.
    settings : Settings
        Its options.
    server : Server
        Forks the processes.
    payload : pathlib.Path
        Where the user's loop was written to.
    verifies : bool
        See `Trial`.

    Raises
    ------
    TrialFailedError
        If the processes cannot be started.
    """

    def __init__(
        self, measured: Measured, settings: Settings, server: Server, payload: Path, *, verifies: bool = False
    ) -> None:
        self.measured = measured
        self.began = time.monotonic()
        task = Trial(payload, settings, is_plain=measured.is_plain, verifies=verifies)
        try:
            self._processes = Throwaway(server, task, settings.options, settings.machine)
        except (NanoError, OSError) as error:
            raise TrialFailedError(str(error)) from error

    def ready(self, timeout: float) -> None:
        """Wait until the first steps are taken, and note what its report says."""
        answers = self._processes.answers(timeout)
        self.measured.steps = answers[0]["steps"]
        self._note(answers)

    def take(self, count: int, timeout: float) -> float:
        """Take steps, and return the seconds of one for one batch: several processes take as many batches."""
        self._processes.ask(count)
        answers = self._processes.answers(timeout)
        self._note(answers)
        seconds = max(_without_pauses(each["seconds"]) for each in answers)
        return seconds / self._processes.size

    def compared(self, timeout: float) -> dict[str, Any]:
        """Return what a trial that verifies has found."""
        found: dict[str, Any] = self._processes.answers(timeout)[0]["comparison"] or {"remark": "nothing was compared"}
        return found

    def end(self) -> None:
        """End the processes."""
        self._processes.end()

    def _note(self, answers: list[dict[str, Any]]) -> None:
        self.measured.memory = sum(each["peak"] for each in answers)


def _without_pauses(seconds: list[float]) -> float:
    """Return the mean of the steps of a turn: with workers batches come in bursts, where a median would mislead."""
    most = _BETWEEN_EPOCHS * statistics.median(seconds)
    return statistics.fmean(each for each in seconds if each <= most)
