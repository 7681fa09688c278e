"""Tries a setting of the loop, such as the number of threads, in whole steps of the loop."""

from __future__ import annotations

import hashlib
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext
from typing import Generic, TypeVar

import torch
from torch.optim import Optimizer

from nano_loop.autotune.choices import Choice, choices_for
from nano_loop.autotune.tuner import HOPELESS, NEARLY_ALWAYS, Budget
from nano_loop.cpu import Machine
from nano_loop.cpu.process import Waits, is_busy, unsure
from nano_loop.patching.optimizers import held_by
from nano_loop.patching.patch_table import shared_change, users

#: The minimum speed-up of the other setting, by medians, and a step's slowdown that triggers another measurement.
PAYS, AGAIN = 1.1, 2.0
#: The minimum and maximum number of rounds, and the number of steps that determine the usual step time.
_LEAST, _MOST, _USUAL = 3, 8, 9
#: The extra time that a trial may cost even if other measurements have spent the budget, in usual steps. With the 1.8
#: steps of these, a hundred steps take less than 3% longer.
_IN_ADVANCE = 1.0
#: Steps are those of an earlier run if their times differ by less than this factor.
_ALIKE = 1.5
#: A measurement is abandoned after this many steps of other optimizers without one of this optimizer.
PATIENCE = 64

_Setting = TypeVar("_Setting", bound=Hashable)


class StepTrial(Generic[_Setting]):
    """A setting of a loop: the initial one, until the other is measured to be faster in the loop's own steps.

    The steps of the first optimizer that steps are timed. A measurement begins and continues while the budget covers a
    slower step, or while all of them cost less than one usual step: operators may have spent the budget of hundreds of
    steps.

    Results are saved for later runs on this machine that step parameters of the same shapes in about the same time. If
    all of these chose the other setting, a run has it from the second step on, until the times of its steps differ.

    If the program changes the `present` setting, the trial ends. To be chosen, the other setting must be `pays` times
    as fast by medians, and faster in the fraction `wins` of at most `most` rounds.
    """

    def __init__(
        self,
        name: str,
        settings: tuple[_Setting, _Setting],
        take: Callable[[_Setting], object],
        budget: Budget,
        machine: Machine,
        *,
        longer: float = 0.0,
        settled: Callable[[], object] = lambda: None,
        present: Callable[[], _Setting] | None = None,
        pays: float = PAYS,
        wins: float = NEARLY_ALWAYS,
        most: int = _MOST,
    ) -> None:
        self.settings, self._now = settings, settings[0]
        #: Whether a measurement is in progress. Each thread tries one setting at a time, since they affect each other.
        self.is_under_way = False
        self._turns = ExitStack()  # blocks other trials of the thread
        self.may_measure = True  # whether measurements may begin; results of earlier runs are used in any case
        self.longer = longer  # the expected extra time of the first step in the other setting, in usual steps
        self._go_on_in, self._budget, self._call_settled = take, budget, settled
        self._present, self._pays, self._wins, self._most = present, pays, wins, most
        self._choices, self._name = choices_for(machine), f"{name} {settings}"
        self._has_ended = False
        self._optimizer: Callable[[], Optimizer | None] | None = None  # the optimizer whose steps are timed
        self._waits: Waits | None = None
        self._waited = 0  # steps of other optimizers since the last one of this optimizer
        self._recent: deque[float] = deque(maxlen=_USUAL)
        self._usual = 0.0
        self._spent = 0.0
        self._end: float | None = None  # end of its optimizer's last step
        self._reset()

    def note(self, optimizer: Optimizer) -> None:
        """Record the end of a step of an optimizer."""
        if self._has_ended or not self._budget.clock.is_here:
            return
        if self._present is not None and self._present() != self._now:
            self.end()
        elif torch.are_deterministic_algorithms_enabled():
            self._reset()
            self._wait()
        elif not self._is_timed(optimizer):
            self._waited += 1
            if self._waited > PATIENCE:  # switch to the optimizer that steps next
                self._optimizer, self._end, self._waited, self._times = None, None, 0, self._no_times()
                self._wait()
        else:
            seconds = math.inf if self._end is None else time.perf_counter() - self._end
            self._waited = 0
            if self.is_under_way:
                self._take(seconds)
            elif self._end is not None:
                self._watch(seconds)
            else:
                self._start_as_saved()
            self._end = time.perf_counter()  # exclude the time to change the setting

    def end(self) -> None:
        """Stop the trial, and keep the current setting."""
        self._has_ended = True
        self._stop()

    def _reset(self) -> None:
        self.setting, self._other = self.settings
        self.medians: dict[_Setting, float] = {}  # the seconds of a step in the last measurement; empty before it
        self.measured = 0  # the number of measurements that have ended
        self.unsure = ""  # a remark if other programs used the CPUs during the last one, which is then not saved
        self._end = None
        self._power: int | None = None  # the power of 2 of the usual time that was last looked up
        self._settled: float | None = None  # the minimum usual time since a measurement
        self._is_unconfirmed = False  # whether the setting is that of earlier runs, and its time is not known yet
        self._times = self._no_times()

    def _is_timed(self, optimizer: Optimizer) -> bool:
        self._optimizer = self._optimizer or weakref.ref(optimizer)
        return self._optimizer() is optimizer

    def _watch(self, seconds: float) -> None:
        """Begin or continue a measurement if there is a reason and time for it."""
        self._recent.append(seconds)
        if self._is_unconfirmed and len(self._recent) >= _LEAST and self._saved_result(min(self._recent)) is None:
            self._is_unconfirmed = False
            self._swap()
            self._wait()
        if len(self._recent) < _USUAL:
            return
        self._usual = statistics.median(self._recent)
        if self._settled is not None:
            self._settled = min(self._settled, self._usual)
            if self._usual <= AGAIN * self._settled:
                return
            self._settled = None
        known = self._known()
        if known is not None:
            self._settle(*known)
        elif self.may_measure and self._has_time() and not users(turns := ("trial of steps", threading.get_ident())):
            self._turns.enter_context(shared_change(turns, nullcontext))
            self.is_under_way = True
            self._waits = self._waits or Waits()
            self._set(self._next())

    def _take(self, seconds: float) -> None:
        """Record the time of a step in a measurement, and choose the setting of the next step."""
        self._times[self._now].append(seconds)
        if self._now == self._other:
            extra = max(seconds - self._usual, 0.0)
            self._spent += extra
            self._budget.spend(extra)
        if self._is_decided():
            self._decide()
        elif self._next() == self._other and not self._has_time():
            self._wait()
        else:
            self._set(self._next())

    def _has_time(self) -> bool:
        times = self._times[self._other]
        longest = max(times) if times else self._usual * (1 + self.longer)
        left = max(self._budget.left(in_advance=False), _IN_ADVANCE * self._usual - self._spent)
        return left > max(longest - self._usual, 0.0)

    def _next(self) -> _Setting:
        """Return the setting of the next step. Settings alternate in rounds of changing order."""
        steps = sum(map(len, self._times.values()))
        return self._other if (steps + steps // 2) % 2 else self.setting

    def _is_decided(self) -> bool:
        ours, others = self._times[self.setting], self._times[self._other]
        if len(ours) != len(others) or len(ours) < _LEAST:
            return False
        return len(ours) >= self._most or statistics.median(others) > HOPELESS * statistics.median(ours)

    def _decide(self) -> None:
        ours, others = self._times[self.setting], self._times[self._other]
        wins = sum(other < our for other, our in zip(others, ours, strict=True))
        medians = {setting: statistics.median(times) for setting, times in self._times.items()}
        is_faster = self._pays * medians[self._other] < medians[self.setting] and wins >= self._wins * len(ours)
        self.measured += 1
        setting = self._other if is_faster else self.setting
        times = {str(tried): seconds * 1e3 for tried, seconds in medians.items()}
        self._choices.put(self._key(), Choice(str(setting), str(self.settings[0]), times))
        share, self._waits = self._waits.share() if self._waits is not None else None, None
        self.unsure = unsure(share)
        self._choices.save(is_busy=is_busy(share))
        self._settle(setting, medians)

    def _settle(self, setting: _Setting, medians: dict[_Setting, float]) -> None:
        if setting != self.setting:
            self._swap()
        self._is_unconfirmed = False
        self.medians, self._settled, self._times = medians, self._usual, self._no_times()
        self._wait()
        self._call_settled()

    def _swap(self) -> None:
        self.setting, self._other = self._other, self.setting

    def _no_times(self) -> dict[_Setting, list[float]]:
        return {setting: [] for setting in self.settings}

    def _known(self) -> tuple[_Setting, dict[_Setting, float]] | None:
        """Return the better setting and the times from an earlier run, until this run has measured."""
        _, power = math.frexp(self._usual)
        if self.measured or power == self._power:
            return None
        self._power = power  # look it up only once
        return self._saved_result(self._usual)

    def _start_as_saved(self) -> None:
        """Change to the other setting if all earlier runs with these parameters chose it, and it cannot cost much."""
        settings = {setting for setting, _ in self._saved_results()}
        if settings == {self._other} and not self.measured and self.longer <= _IN_ADVANCE:
            self._is_unconfirmed = True
            self._swap()
            self._set(self.setting)

    def _saved_result(self, seconds: float) -> tuple[_Setting, dict[_Setting, float]] | None:
        """Return the saved result in which a step in the present setting took about as long."""
        results = self._saved_results()
        distances = [abs(math.log(seconds / times[self._now])) for _, times in results]
        closest = min(distances, default=math.inf)
        return results[distances.index(closest)] if closest < math.log(_ALIKE) else None

    def _saved_results(self) -> list[tuple[_Setting, dict[_Setting, float]]]:
        """Return the better settings and the times that were saved for the shapes of these parameters."""
        names, prefix = {str(setting): setting for setting in self.settings}, self._prefix()
        results = []
        for key, (algorithm, _, milliseconds) in self._choices.all().items():
            is_complete = algorithm in names and all(milliseconds.get(name, 0.0) > 0 for name in names)
            if key.startswith(prefix) and is_complete:
                times = {setting: milliseconds[name] / 1e3 for name, setting in names.items()}
                results.append((names[algorithm], times))
        return results

    def _key(self) -> str:
        """Return the key of saved results: the shapes of the parameters, and the approximate step time."""
        _, power = math.frexp(self._usual)
        return f"{self._prefix()}2^{power} s"

    def _prefix(self) -> str:
        optimizer = None if self._optimizer is None else self._optimizer()
        shapes = repr([tuple(parameter.shape) for parameter in (held_by(optimizer) if optimizer is not None else [])])
        return f"{self._name} {hashlib.sha256(shapes.encode()).hexdigest()[:16]} "

    def _wait(self) -> None:
        """Use the better setting until there is a reason or time to measure."""
        self._stop()
        self._recent.clear()
        self._set(self.setting)

    def _stop(self) -> None:
        self.is_under_way = False
        self._turns.close()

    def _set(self, setting: _Setting) -> None:
        if setting != self._now:
            self._go_on_in(setting)
            self._now = setting
