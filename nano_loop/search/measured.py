"""What a search knows of one candidate: its times, turn by turn, and the errors of its numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from nano_loop.search.candidates import OF_NUMBERS, Changes
from nano_loop.search.result import Row

#: How many times as fast as the options as they are a candidate has to be, and in what part of the turns faster.
PAYS, MOST_TURNS = 1.02, 0.75
#: Turns of a candidate, at least.
EARLY = 3
#: The largest error of the loss, relative to fp64, with which a candidate may be chosen. A model that computes
#: something else under autocast does so by hand as well, so `verify` finds no fault there.
TOLERANCE = 0.1


@dataclass(eq=False)
class Measured:
    """A candidate and its times."""

    row: Row  # in the result; its times are there at the end
    #: The time of a step for one batch, turn by turn: of the candidate, and of the options as they are.
    seconds: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    is_compared: bool = False  # whether `verify` was asked about its numbers
    remark: str = ""  # why it could not tell

    @property
    def ratios(self) -> list[float]:
        """How many times as fast as the options as they are, turn by turn."""
        return [own / seconds for own, seconds in zip(self.reference, self.seconds, strict=True)]

    @property
    def speed(self) -> float | None:
        """How many times as fast as the options as they are, by the median of the turns; None without turns."""
        return statistics.median(self.ratios) if self.seconds else None

    @property
    def pays(self) -> bool:
        """Whether it may replace the options as they are."""
        often = sum(ratio > 1 for ratio in self.ratios) >= MOST_TURNS * len(self.ratios)
        return len(self.ratios) >= EARLY and often and (self.speed or 0.0) >= PAYS

    @property
    def changes_batch(self) -> bool:
        """Whether it trains with other batches than the options as they are, which speed alone is no reason for."""
        return "num_processes" in self.row.options

    @property
    def numbers(self) -> Changes:
        """The options that change its numbers. Candidates with equal ones are compared once."""
        return {name: value for name, value in self.row.options.items() if name in OF_NUMBERS}

    def compare(self, comparison: dict[str, Any]) -> None:
        """Take note of what `verify` says of its numbers."""
        self.is_compared, self.remark = True, comparison.get("remark", "")
        self.row.loss, self.row.gradients = comparison.get("loss"), comparison.get("gradients")
        if fault := comparison.get("fault"):
            self.row.note = f"not exact: {fault} is off by more than rounding"
        elif (self.row.loss or 0.0) > TOLERANCE:
            self.row.note = f"not exact: the loss is off by {self.row.loss:.0%}"

    def finish(self, own_seconds: float, own_speed: float) -> Row:
        """Return the row with the times, which are those of the options as they are by the ratios of the turns.

        So a row with a shorter time has a higher speed, although the machine may have been slower in its turns.

        Parameters
        ----------
        own_seconds : float
            The time of a step with the options as they are.
        own_speed : float
            How many times as fast that is as the loop without nano_loop.
        """
        times = [1e3 * own_seconds / ratio for ratio in self.ratios]
        if len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            self.row.spread = low, high
        if self.speed is not None:
            self.row.milliseconds = 1e3 * own_seconds / self.speed
            self.row.speed_up = 1.0 if self.row.plain else own_speed * self.speed
        return self.row
