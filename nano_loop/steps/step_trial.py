"""Times steps of the loop in two settings in turn, such as two numbers of threads, and goes on with the faster one."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.autotune.budget import Budget
from nano_loop.autotune.tuner import HOPELESS, NEARLY_ALWAYS
from nano_loop.patching.deterministic_mode import may_depend_on_times

#: How many times as fast the other setting has to be, by the medians, and how many times as long a step has to take
#: for another measurement.
PAYS, AGAIN = 1.1, 2.0
#: How many rounds there are, at least and at most, and how many steps give the usual time of one.
_LEAST, _MOST, _USUAL = 3, 8, 9

_Setting = TypeVar("_Setting", bound=Hashable)


class StepTrial(Generic[_Setting]):
    """The setting of a loop: the one that it has, until the other has been faster in the loop's own steps.

    A step that is slower than usual in the other setting counts as the cost. A measurement begins, and goes on, while
    the budget has the time of such a step.

    Parameters
    ----------
    settings : tuple
        That of the loop now, and the other.
    take : callable
        Lets the loop go on in a setting.
    budget : Budget
        Says how many seconds may still be lost.
    slowest : float
        How many times as long as usual the first step in the other setting is taken to be.
    pays, wins, most : float, float, int
        How many times as fast the other setting has to be by the medians, in which share of the rounds it has to be
        faster, and how many rounds there are at most.

    Attributes
    ----------
    setting
        The setting in which the loop goes on.
    medians : dict
        The seconds of a step by the setting, as they were measured last. Empty before that.
    measured : int
        How many measurements have ended.
    """

    def __init__(
        self,
        settings: tuple[_Setting, _Setting],
        take: Callable[[_Setting], None],
        budget: Budget,
        *,
        slowest: float,
        pays: float = PAYS,
        wins: float = NEARLY_ALWAYS,
        most: int = _MOST,
    ) -> None:
        self.setting, self._other = self._now, _ = self.settings = settings
        self.medians: dict[_Setting, float] = {}
        self.measured = 0
        self._apply, self._budget = take, budget
        self._slowest, self._pays, self._wins, self._most = slowest, pays, wins, most
        self._thread = threading.get_ident()
        self._end: float | None = None
        self._recent: deque[float] = deque(maxlen=_USUAL)
        self._usual = self._spent = 0.0
        self._settled: float | None = None  # the least usual time since a measurement
        self._is_measuring = False
        self._times: dict[_Setting, list[float]] = {setting: [] for setting in settings}

    def note(self) -> None:
        """Note the end of a step. Those of the thread that has made this object count."""
        if threading.get_ident() != self._thread:
            return
        if not may_depend_on_times():
            self.forget()
        elif self._end is not None:
            seconds = time.perf_counter() - self._end
            if self._is_measuring:
                self._take(seconds)
            else:
                self._watch(seconds)
        self._end = time.perf_counter()  # to change the setting takes time, too

    def forget(self) -> None:
        """Go on in the first setting, as before any measurement."""
        self.setting, self._other = self.settings
        self.medians, self._settled, self._end = {}, None, None
        self._times = {setting: [] for setting in self._times}
        self._wait()

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
        """Note the time of a step in a measurement, and choose the setting of the next step."""
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
        longest = max(times) if times else self._usual * self._slowest
        return self._budget.left(self._spent) > max(longest - self._usual, 0.0)

    def _next(self) -> _Setting:
        """Return the setting of the next step: they take turns, in rounds whose order changes."""
        steps = sum(map(len, self._times.values()))
        return self._other if (steps + steps // 2) % 2 else self.setting

    def _is_decided(self) -> bool:
        ours, others = self._times[self.setting], self._times[self._other]
        if len(ours) != len(others) or len(ours) < _LEAST:
            return False
        return len(ours) >= self._most or statistics.median(others) > HOPELESS * statistics.median(ours)

    def _settle(self) -> None:
        ours, others = self._times[self.setting], self._times[self._other]
        wins = sum(other < our for other, our in zip(others, ours, strict=True))
        self.medians = {setting: statistics.median(times) for setting, times in self._times.items()}
        is_faster = self._pays * self.medians[self._other] < self.medians[self.setting]
        if is_faster and wins >= self._wins * len(ours):
            self.setting, self._other = self._other, self.setting
        self.measured += 1
        self._settled = self.medians[self.setting]
        self._times = {setting: [] for setting in self._times}
        self._wait()

    def _wait(self) -> None:
        """Go on in the better setting, until there is a reason or time to measure."""
        self._is_measuring = False
        self._recent.clear()
        self._set(self.setting)

    def _set(self, setting: _Setting) -> None:
        if setting != self._now:
            self._apply(setting)
            self._now = setting


class ThreadTrial(StepTrial[int]):
    """The number of threads of a loop: that which torch has, and another one. It ends when the user sets the number.

    The first step with the other number is taken to be as many times slower as there are more threads.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer whose steps are timed. It gets a hook after ``step``, which `close` removes.
    other, budget : int, Budget
        The other number; see `StepTrial`.
    """

    def __init__(self, optimizer: Optimizer, other: int, budget: Budget) -> None:
        numbers = torch.get_num_threads(), other
        super().__init__(numbers, torch.set_num_threads, budget, slowest=max(numbers))
        self._hook = optimizer.register_step_post_hook(self._note)

    def close(self) -> None:
        """Remove the hook. The number of threads stays."""
        self._hook.remove()

    @override
    def forget(self) -> None:
        if threading.get_ident() == self._thread and torch.get_num_threads() == self._now:
            super().forget()

    def _note(self, *_: object) -> None:
        if threading.get_ident() == self._thread and torch.get_num_threads() != self._now:
            self.close()
        else:
            self.note()
