"""Times equivalent algorithms in turn, within a budget, and keeps the fastest one that is accurate enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_loop.autotune.choices import Choice, Choices
from nano_loop.runtime.clock import StepClock

#: The budget: this many steps at first, and later this fraction of the run's time. A measurement that would exceed it
#: is abandoned once that is detected, so a hundred steps take less than 3% longer.
STEPS, SHARE = 1.8, 0.018


class Budget:
    """The time for measurements in a run's thread, from the third step on: the first allocate and create kernels."""

    def __init__(self, clock: StepClock, measures: bool = True) -> None:
        self.clock, self._measures = clock, measures
        self._spent = 0.0

    def left(self, in_advance: bool = True) -> float:
        """Return the seconds left for measurements, with some steps' worth `in_advance` of the run's fraction."""
        clock = self.clock
        if clock.steps < 2 or not self._measures or not clock.is_here:
            return 0.0
        seconds = SHARE * (time.perf_counter() - clock.began)
        # Use the shortest step, because steps with measurements take longer.
        return (max(seconds, STEPS * clock.shortest) if in_advance else seconds) - self._spent

    def spend(self, seconds: float) -> None:
        """Record the seconds that a measurement has taken."""
        self._spent += seconds


#: Computes once, and returns all results.
Algorithm = Callable[[], Sequence[Tensor]]

#: The speedup required to replace another algorithm, and the slowdown at which measuring stops.
PAYS, HOPELESS = 1.05, 1.3
#: The fraction of rounds in which it must be faster: all of three.
NEARLY_ALWAYS = 0.75
#: Timings per algorithm: the minimum, and the maximum while all timings together take less than `_ENOUGH` seconds.
_LEAST, _MOST, _ENOUGH = 3, 12, 0.004
#: The error that is always allowed.
_TINY = 1e-3
#: The number of elements per tensor that are compared.
_COMPARED = 1 << 16
#: The factor by which the first call of an algorithm may be slower than later ones.
_FAR = 2.0
#: The errors that torch raises if it cannot compute something.
_FAILURES = (RuntimeError, MemoryError)
#: The allowed difference from torch's algorithm if that is the reference: both round to bf16, by up to 2^-9.
_ROUNDING = 2.0**-7


class Race(NamedTuple):
    """Algorithms for the same computation, and their required accuracy."""

    algorithms: Mapping[str, Algorithm]  # without visible side effects
    torchs: str  # the name of torch's own algorithm, whose accuracy the others must match
    reference: Algorithm | None  # computes it with small errors only; None: torch's algorithm is the reference
    as_exact: float = 1.2  # the maximum error relative to that of torch's algorithm, both against the reference
    bound: float = _ROUNDING  # the maximum error of an algorithm if torch's algorithm is the reference
    pays: float = PAYS  # the speedup over the default that an algorithm must have to replace it
    #: Whether the speedup is over torch's algorithm instead of the default, because the others are less accurate.
    torchs_is_beaten: bool = False
    overhead: float = 0.0  # additional seconds per call of any algorithm but torch's, which are not timed


class Tuner:
    """Chooses among algorithms for one run, by earlier measurements and those for which the budget has time."""

    def __init__(self, choices: Choices, budget: Budget, timer: Callable[[], float] = time.perf_counter) -> None:
        self.use(choices)
        #: The seconds spent on measurements.
        self.spent = 0.0
        #: The choices measured in this run.
        self.new_choices: list[Choice] = []
        self._budget = budget
        self._timer = timer
        self._is_measuring = False

    @property
    def measured(self) -> int:
        """The number of keys measured in this run."""
        return len(self.new_choices)

    @property
    def replaced(self) -> int:
        """The number of times that another algorithm than the default was the fastest."""
        return sum(choice.algorithm != choice.guess for choice in self.new_choices)

    def use(self, choices: Choices) -> None:
        """Continue with the choices for torch's current number of threads. For other numbers, nothing is measured."""
        self.choices = choices
        self.threads = torch.get_num_threads()

    def choose(self, key: str, guess: str, race: Callable[[], Race]) -> str | None:
        """Return the algorithm for a key, or None, for the default `guess`; measure if there is time."""
        choice = self.choices.get(key)
        # Calls made by an algorithm during timing are measured where the loop makes them.
        is_usual = not self._is_measuring and self.threads == torch.get_num_threads()
        if choice is None and is_usual and self._budget.left() > 0:
            choice = self._measure(key, guess, race())
        return None if choice is None else choice.algorithm

    def _measure(self, key: str, guess: str, race: Race) -> Choice | None:
        begun, self._is_measuring = self._timer(), True
        try:
            choice = fastest(race, guess, self._budget.left(), self._timer)
        except _FAILURES:  # memory may be sufficient later
            return None
        finally:
            self._is_measuring = False
            seconds = self._timer() - begun
            self.spent += seconds
            self._budget.spend(seconds)
        if choice is not None:
            self.choices.put(key, choice)
            self.new_choices.append(choice)
        return choice


def fastest(race: Race, guess: str, seconds: float, timer: Callable[[], float] = time.perf_counter) -> Choice | None:
    """Time algorithms in turn and return the choice, or None if that would take longer than `seconds`.

    Algorithms less accurate than torch's are excluded, and those much slower than another are not timed further. Since
    any timing may be disturbed on a busy machine, an algorithm must be faster nearly every time to be chosen.
    """
    begun = timer()
    first = _as_exact(race, timer, seconds)
    if first is None:
        return None
    guess = guess if guess in first else race.torchs
    beaten = race.torchs if race.torchs_is_beaten else guess
    _try_again(race, first, beaten, seconds - (timer() - begun), timer)
    in_time = [name for name in first if name == beaten or not _is_far(first, name, beaten)]
    if len(in_time) > 1 and timer() - begun + _LEAST * sum(first[name] for name in in_time) > seconds:
        return None
    times = _timed(race, beaten, in_time, timer)
    shortest = {name: min(times.get(name, [time_])) for name, time_ in first.items()}
    overheads = {name: 0.0 if name == race.torchs else race.overhead for name in times}
    whole = {name: [time_ + overheads[name] for time_ in times[name]] for name in times}
    faster = [name for name in whole if name != beaten and _is_faster(whole[name], whole[beaten], race.pays)]
    algorithm = min(faster, key=lambda name: shortest[name], default=beaten)
    return Choice(algorithm, guess, {name: value * 1e3 for name, value in shortest.items()})


def _is_far(first: Mapping[str, float], name: str, beaten: str) -> bool:
    """Whether an algorithm took much longer than another one. Smaller differences in first timings are unreliable."""
    return first[name] > _FAR * HOPELESS * first[beaten]


def _try_again(race: Race, first: dict[str, float], beaten: str, seconds: float, timer: Callable[[], float]) -> None:
    """Retime algorithms that took much longer than another one, if there is time, in case they were disturbed."""
    for name in [name for name in first if _is_far(first, name, beaten)]:
        if first[name] <= seconds:
            start = timer()
            race.algorithms[name]()
            first[name] = min(first[name], timer() - start)
            seconds -= first[name]


def _timed(race: Race, beaten: str, in_time: list[str], timer: Callable[[], float]) -> dict[str, list[float]]:
    """Return the times of algorithms that took turns until the end; empty if there is only one."""
    times: dict[str, list[float]] = {name: [] for name in in_time}
    begun = timer()
    for round_ in range(_MOST):
        if len(in_time) == 1 or (round_ >= _LEAST and timer() - begun > _ENOUGH):
            break
        for name in in_time[:: -1 if round_ % 2 else 1]:
            start = timer()
            race.algorithms[name]()
            times[name].append(timer() - start)
        if round_:  # a single disturbed timing gets a second chance
            best = min(min(times[name]) for name in in_time)
            in_time = [name for name in in_time if name == beaten or min(times[name]) <= HOPELESS * best]
    return {name: times[name] for name in in_time if times[name]}


def _is_faster(times: Sequence[float], of_beaten: Sequence[float], pays: float) -> bool:
    """Whether an algorithm was sufficiently and almost always faster than another."""
    wins = sum(a < b for a, b in zip(times, of_beaten, strict=True))
    return pays * min(times) < min(of_beaten) and wins >= NEARLY_ALWAYS * len(times)


def _as_exact(race: Race, timer: Callable[[], float], seconds: float) -> dict[str, float] | None:
    """Return the accurate algorithms that do not raise, with times of first calls, or None if that takes too long."""
    begun = timer()
    of_torch, took = _tried(race.algorithms[race.torchs], timer)
    elapsed = {race.torchs: took}
    others = {name: algorithm for name, algorithm in race.algorithms.items() if name != race.torchs}
    if not others:
        return elapsed
    if (1 + len(others)) * took > seconds:
        return None
    reference, of_reference = (of_torch, took) if race.reference is None else _tried(race.reference, timer)
    if race.reference is None:
        bounds = [race.bound] * len(reference)
    else:
        bounds = [max(race.as_exact * error, _TINY) for error in _errors(of_torch, reference)]
    for name, algorithm in others.items():
        if timer() - begun > seconds:
            return None
        if algorithm is race.reference:
            elapsed[name] = of_reference
            continue
        try:
            computed, took = _tried(algorithm, timer)
        except _FAILURES:
            continue
        if all(error <= bound for error, bound in zip(_errors(computed, reference), bounds, strict=True)):
            elapsed[name] = took
    return elapsed


class _Sample(NamedTuple):
    """Some elements of a tensor, in fp32. The tensor is freed, so a race needs the memory of one algorithm only."""

    shape: torch.Size
    elements: Tensor


def _tried(algorithm: Algorithm, timer: Callable[[], float]) -> tuple[list[_Sample], float]:
    """Return samples of an algorithm's results, and its time."""
    start = timer()
    computed = algorithm()
    took = timer() - start
    with torch.no_grad():
        return [_Sample(tensor.shape, _sample(tensor).float()) for tensor in computed], took


def _errors(computed: Sequence[_Sample], reference: Sequence[_Sample]) -> list[float]:
    """Return the RMS error of each tensor, relative to the RMS of the reference."""
    return [_error(a, b) for a, b in zip(computed, reference, strict=True)]


def _error(computed: _Sample, reference: _Sample) -> float:
    if computed.shape != reference.shape:
        return float("inf")
    a, b = computed.elements, reference.elements
    if not b.numel():
        return 0.0
    of, error = float(b.square().mean()), float((a - b).square().mean())
    if error != error:  # NaN: inconclusive if the reference is NaN, too
        return 0.0 if of != of else float("inf")
    return (error / of) ** 0.5 if of > 0 else (0.0 if error == 0 else float("inf"))


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a large tensor, to limit the memory of a comparison."""
    if tensor.numel() <= _COMPARED:
        return tensor
    return tensor.take(torch.randint(tensor.numel(), (_COMPARED,), generator=torch.Generator().manual_seed(0)))
