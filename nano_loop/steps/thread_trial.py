"""Times steps of the loop with two numbers of threads in turn, and goes on with the faster one."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

import torch
from torch.optim import Optimizer

from nano_loop.autotune.budget import Budget
from nano_loop.autotune.tuner import HOPELESS, NEARLY_ALWAYS

#: How many times as fast the other number has to be, by the medians, and how many times as long a step has to take for
#: another measurement.
PAYS, AGAIN = 1.1, 2.0
#: How many rounds there are, at least and at most, and how many steps give the usual time of one.
_LEAST, _MOST, _USUAL = 3, 8, 9


class ThreadTrial:
    """The number of threads of a loop: that which torch has, until another one has been faster in the loop's own steps.

    A step that is slower than usual by the other number counts as the cost. A measurement begins, and goes on, while
    the budget has the time of such a step; the first is taken to be as many times slower as there are more threads.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer whose steps are timed, in this thread alone. It gets a hook after ``step``, which `close` removes.
    other : int
        The other number.
    budget : Budget
        Says how many seconds may still be lost.

    Attributes
    ----------
    number : int
        The number of threads with which the loop goes on.
    medians : dict of int to float
        The seconds of a step by the number of threads, as they were measured last. Empty before that.
    measured : int
        How many measurements have ended.
    """

    def __init__(self, optimizer: Optimizer, other: int, budget: Budget) -> None:
        self.number = self._now = torch.get_num_threads()
        self.medians: dict[int, float] = {}
        self.measured = 0
        #: Both numbers.
        self.numbers = (self.number, other)
        self._other, self._budget = other, budget
        self._thread = threading.get_ident()
        self._end: float | None = None
        self._recent: deque[float] = deque(maxlen=_USUAL)
        self._usual = self._spent = 0.0
        self._settled: float | None = None  # the least usual time since a measurement
        self._is_measuring = False
        self._times: dict[int, list[float]] = {self.number: [], other: []}
        self._hook = optimizer.register_step_post_hook(self._note)

    def close(self) -> None:
        """Remove the hook. The number of threads stays."""
        self._hook.remove()

    def _note(self, *_: object) -> None:
        """Note the end of a step."""
        if threading.get_ident() != self._thread:
            return
        if torch.get_num_threads() != self._now:  # the user has set it
            self.close()
            return
        now, before = time.perf_counter(), self._end
        self._end = now
        if before is None:
            return
        if self._is_measuring:
            self._take(now - before)
        else:
            self._watch(now - before)

    def _watch(self, seconds: float) -> None:
        """Begin a measurement, or go on with it, if there is a reason and time for it."""
        self._recent.append(seconds)
        if len(self._recent) < _USUAL:
            return
        self._usual = statistics.median(self._recent)
        if self._settled is not None:
            self._settled = min(self._settled, self._usual)
            if self._usual <= AGAIN * self._settled:
                return
            self._settled = None
        if self._has_time():
            self._is_measuring = True
            self._set(self._next())

    def _take(self, seconds: float) -> None:
        """Note the time of a step in a measurement, and set the number of threads of the next step."""
        self._times[self._now].append(seconds)
        if self._now == self._other:
            self._spent += max(seconds - self._usual, 0.0)
        if self._is_decided():
            self._settle()
        elif self._next() == self._other and not self._has_time():
            self._wait()
        else:
            self._set(self._next())

    def _has_time(self) -> bool:
        times = self._times[self._other]
        longest = max(times) if times else self._usual * max(self.numbers)
        return self._budget.left(self._spent) > max(longest - self._usual, 0.0)

    def _next(self) -> int:
        """Return the number of the next step: they take turns, in rounds whose order changes."""
        steps = sum(map(len, self._times.values()))
        return self._other if (steps + steps // 2) % 2 else self.number

    def _is_decided(self) -> bool:
        ours, others = self._times[self.number], self._times[self._other]
        if len(ours) != len(others) or len(ours) < _LEAST:
            return False
        return len(ours) >= _MOST or statistics.median(others) > HOPELESS * statistics.median(ours)

    def _settle(self) -> None:
        ours, others = self._times[self.number], self._times[self._other]
        wins = sum(other < our for other, our in zip(others, ours, strict=True))
        self.medians = {number: statistics.median(times) for number, times in self._times.items()}
        is_faster = PAYS * self.medians[self._other] < self.medians[self.number]
        if is_faster and wins >= NEARLY_ALWAYS * len(ours):
            self.number, self._other = self._other, self.number
        self.measured += 1
        self._settled = self.medians[self.number]
        self._times = {number: [] for number in self._times}
        self._wait()

    def _wait(self) -> None:
        """Go on with the better number, until there is a reason or time to measure."""
        self._is_measuring = False
        self._recent.clear()
        self._set(self.number)

    def _set(self, number: int) -> None:
        if number != self._now:
            torch.set_num_threads(number)
            self._now = number
