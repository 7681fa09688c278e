"""Lets candidates take steps in turn until it is known which is the fastest. Those that cannot win stop early."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

#: Seconds that the steps of one turn take, at least.
TURN = 0.12
#: How many turns each takes: before one may be out, and at most.
LEAST, MOST = 4, 12
#: How many times as slow as the fastest one is out at once, and how many times as slow in nearly all turns.
HOPELESS, SLOWER = 1.4, 1.02
NEARLY_ALL = 0.75


class Runner(Protocol):
    """What takes part."""

    def take(self, count: int, timeout: float) -> float:
        """Take steps, and return the seconds of one."""


R = TypeVar("R", bound=Runner)


class Race:
    """A race between runners, of which those that are slower drop out.

    Parameters
    ----------
    runners : mapping
        The runners by name.
    until : float
        The time by `clock` when it ends.
    dropped : callable
        Is called with the name of a runner that is out, and the reason: an empty string if it is slower.
    failures : tuple of exception types
        What a runner raises that has failed, which is then out.
    clock : callable
        Returns the time in seconds.
    beside : str, optional
        A runner that cannot win, such as the loop without nano_loop. Nobody drops out because it is faster.
    """

    def __init__(
        self,
        runners: Mapping[str, Runner],
        until: float,
        dropped: Callable[[str, str], None],
        failures: tuple[type[Exception], ...] = (),
        clock: Callable[[], float] = time.monotonic,
        beside: str | None = None,
    ) -> None:
        self.turns: dict[str, list[float]] = {name: [] for name in runners}
        self._live = dict(runners)
        self._until = until
        self._dropped = dropped
        self._failures = failures
        self._clock = clock
        self._counts = dict.fromkeys(runners, 1)
        self._beside = beside

    def run(self, keep: str | None = None) -> list[str]:
        """Let them run, and return the names of those that are not out, the fastest first.

        Parameters
        ----------
        keep : str, optional
            A runner that stays in, for comparison, also if it is slower.
        """
        for number in range(MOST):
            names = [*self._live]
            for name in names if number % 2 else reversed(names):
                self._turn(name)
            if number == 0:
                self._choose_counts()
            self._drop(number + 1, keep)
            if len(self._live) <= 1 or (number + 1 >= LEAST and self._is_decided(keep)) or self._is_over():
                break
        return sorted(self._live, key=self._median)

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as fast as another a runner is, by the median of the turns that both have taken."""
        return statistics.median(self._ratios(other, name))

    def wins(self, name: str, other: str, by: float) -> bool:
        """Whether a runner is so many times as fast as another by the median, and faster in nearly all turns."""
        ratios = self._ratios(other, name)
        often = sum(each > 1 for each in ratios) >= NEARLY_ALL * len(ratios)
        return bool(ratios) and statistics.median(ratios) >= by and often

    def _turn(self, name: str) -> None:
        # One turn more than the time allows, so that each has one.
        timeout = max(self._until - self._clock(), 1.0) if self.turns[name] else max(self._until - self._clock(), 10.0)
        try:
            self.turns[name].append(self._live[name].take(self._counts[name], timeout))
        except self._failures as error:
            del self._live[name]
            self._dropped(name, str(error))

    def _choose_counts(self) -> None:
        """Let the turns of all take about as long, and forget the first ones, unless they took long already."""
        seconds = {name: self.turns[name][-1] for name in self._live}
        self._counts = {name: max(1, round(TURN / each)) if each else 1 for name, each in seconds.items()}
        if max(seconds.values(), default=0.0) < TURN:
            for turns in self.turns.values():
                turns.clear()

    def _drop(self, number: int, keep: str | None) -> None:
        timed = [name for name in self._live if self.turns[name]]
        if not (may_win := [name for name in timed if name != self._beside]):
            return
        best = min(may_win, key=self._median)
        for name in timed:
            if name in (best, keep):
                continue
            # By its best turn: what slows one turn down, such as a kernel that is compiled, is gone in the next.
            hopeless = number >= 3 and min(self.turns[name]) >= HOPELESS * self._median(best)
            if hopeless or (number >= LEAST and self.wins(best, name, SLOWER)):
                del self._live[name]
                self._dropped(name, "")

    def _is_decided(self, keep: str | None) -> bool:
        """Whether no more than one that may win is left besides the one that is kept, and which is faster is known."""
        others = [name for name in self._live if name not in (keep, self._beside)]
        if len(others) != 1 or keep not in self._live:
            return not others
        return self.wins(keep, others[0], SLOWER) or self.wins(others[0], keep, SLOWER)

    def _is_over(self) -> bool:
        return self._clock() >= self._until

    def _median(self, name: str) -> float:
        return statistics.median(self.turns[name]) if self.turns[name] else float("inf")

    def _ratios(self, name: str, other: str) -> list[float]:
        """Return the times of a runner over another's, turn by turn."""
        return [a / b for a, b in zip(self.turns[name], self.turns[other], strict=False)]
