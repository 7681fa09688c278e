"""Times ways to compute the same in turn, and keeps the fastest one that is as exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_loop.autotune.budget import Budget
from nano_loop.autotune.choices import Choice, Choices

#: Computes once, and returns all that is computed.
Way = Callable[[], Sequence[Tensor]]

#: How much faster a way has to be than the guess to replace it, and how much slower to be measured no further.
PAYS, HOPELESS = 1.05, 1.3
#: In which share of the rounds it has to be faster: in all of three.
_NEARLY_ALWAYS = 0.75
#: How often a way is timed: at least, and at most while all timings together take less than `_ENOUGH`, in seconds.
_LEAST, _MOST, _ENOUGH = 3, 12, 0.004
#: The error that a way may have in any case.
_TINY = 1e-3
#: How many elements of a tensor are compared.
_COMPARED = 1 << 16
#: How much longer than later a way may take when it computes first.
_FAR = 2.0
#: What torch raises where it cannot compute something.
_FAILURES = (RuntimeError, MemoryError)
#: How far a way may be from torch's where that is the reference: both round to bf16, by up to 2^-9.
_ROUNDING = 2.0**-7


class Ways(NamedTuple):
    """The ways to compute something.

    Attributes
    ----------
    by_name : mapping of str to callable
        Compute it. They change nothing that others see.
    torchs : str
        The name of torch's own way, which the others have to be as exact as.
    reference : callable or None
        Computes it with small errors only. None: what torch's way computes is the reference.
    as_exact : float
        How many times as large as that of torch's way the error of another may be, both against the reference.
    """

    by_name: Mapping[str, Way]
    torchs: str
    reference: Way | None
    as_exact: float = 1.2


class Tuner:
    """Chooses between ways, for one run.

    Parameters
    ----------
    choices : Choices
        What was measured before.
    budget : Budget
        Says whether there is time for one more measurement.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        choices: Choices,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.choices = choices
        #: The seconds that measurements have taken.
        self.spent = 0.0
        #: What was measured in this run.
        self.found: list[Choice] = []
        self._budget = budget
        self._clock = clock
        self._is_measuring = False

    @property
    def turn(self) -> int:
        """Changes when `choose` may know what it did not know before."""
        return self._budget.turn

    @property
    def measured(self) -> int:
        """How many keys were measured in this run."""
        return len(self.found)

    @property
    def replaced(self) -> int:
        """For how many of them another way than the guess was the fastest."""
        return sum(choice.way != choice.guess for choice in self.found)

    def choose(self, key: str, guess: str, ways: Callable[[], Ways]) -> str | None:
        """Return the name of the way to take, or None if it is not known yet, and `guess` is to be taken.

        Parameters
        ----------
        key : str
            What the fastest way depends on.
        guess : str
            The way to take without a measurement.
        ways : callable
            Returns the ways, by which they are measured if there is time for it.
        """
        found = self.choices.get(key)
        if found is None and self._budget.left(self.spent) > 0:
            found = self._measure(key, guess, ways())
        return None if found is None else found.way

    def _measure(self, key: str, guess: str, ways: Ways) -> Choice | None:
        begun, outermost = self._clock(), not self._is_measuring
        self._is_measuring = True
        try:
            choice = fastest(ways, guess, self._budget.left(self.spent), self._clock)
        except _FAILURES:  # there may be memory for it later
            return None
        finally:
            self._is_measuring = not outermost
            if outermost:  # what is measured inside of another measurement is a part of it
                self.spent += self._clock() - begun
        if choice is not None:
            self.choices.put(key, choice)
            self.found.append(choice)
        return choice


def fastest(ways: Ways, guess: str, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Choice | None:
    """Time ways in turn, and return the choice, or None if that would take longer than `seconds`.

    A way that is less exact than torch's is left out, and one that is far slower than another is timed no further. On a
    busy machine, any way may be disturbed, so a way replaces the guess only if it was faster nearly each time.
    """
    begun = clock()
    first = _as_exact(ways, clock, seconds)
    if first is None:
        return None
    guess = guess if guess in first else ways.torchs
    # The first time is not to be trusted, but by far.
    in_time = [name for name, time_ in first.items() if name == guess or time_ <= _FAR * HOPELESS * first[guess]]
    if len(in_time) > 1 and clock() - begun + _LEAST * sum(first[name] for name in in_time) > seconds:
        return None
    times = _timed(ways, guess, in_time, clock)
    shortest = {name: min(times.get(name, [time_])) for name, time_ in first.items()}
    faster = [name for name, time in times.items() if name != guess and _is_faster(time, times[guess])]
    way = min(faster, key=lambda name: shortest[name], default=guess)
    return Choice(way, guess, {name: value * 1e3 for name, value in shortest.items()})


def _timed(ways: Ways, guess: str, in_time: list[str], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the times of ways that have taken turns until the end; nothing where there is only one."""
    times: dict[str, list[float]] = {name: [] for name in in_time}
    begun = clock()
    for round_ in range(_MOST):
        if len(in_time) == 1 or (round_ >= _LEAST and clock() - begun > _ENOUGH):
            break
        for name in in_time[:: -1 if round_ % 2 else 1]:
            start = clock()
            ways.by_name[name]()
            times[name].append(clock() - start)
        best = min(min(times[name]) for name in in_time)
        in_time = [name for name in in_time if name == guess or min(times[name]) <= HOPELESS * best]
    return {name: times[name] for name in in_time if times[name]}


def _is_faster(times: Sequence[float], of_guess: Sequence[float]) -> bool:
    """Whether a way was faster than the guess by enough, and nearly always."""
    wins = sum(a < b for a, b in zip(times, of_guess, strict=True))
    return PAYS * min(times) < min(of_guess) and wins >= _NEARLY_ALWAYS * len(times)


def _as_exact(ways: Ways, clock: Callable[[], float], seconds: float) -> dict[str, float] | None:
    """Return torch's way, and those that are as exact, each with the time that it took first.

    None if that would take longer than `seconds`. A way that raises, as where there is no memory for it, is left out.
    """
    begun = clock()
    of_torch = ways.by_name[ways.torchs]()
    elapsed = {ways.torchs: clock() - begun}
    others = {name: way for name, way in ways.by_name.items() if name != ways.torchs}
    if not others:
        return elapsed
    if (1 + len(others)) * elapsed[ways.torchs] > seconds:
        return None
    start = clock()
    reference = of_torch if ways.reference is None else ways.reference()
    of_reference = clock() - start
    if ways.reference is None:
        bounds = [_ROUNDING] * len(reference)
    else:
        bounds = [max(ways.as_exact * error, _TINY) for error in _errors(of_torch, reference)]
    for name, way in others.items():
        if clock() - begun > seconds:
            return None
        if way is ways.reference:
            elapsed[name] = of_reference
            continue
        start = clock()
        try:
            computed = way()
        except _FAILURES:
            continue
        took = clock() - start
        if all(error <= bound for error, bound in zip(_errors(computed, reference), bounds, strict=True)):
            elapsed[name] = took
    return elapsed


def _errors(found: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Return the rms of the difference of each tensor to that of the reference, in units of the reference's rms."""
    with torch.no_grad():
        return [_error(a, b) for a, b in zip(found, reference, strict=True)]


def _error(found: Tensor, reference: Tensor) -> float:
    if found.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    a, b = (_sample(each).float() for each in (found, reference))
    of, error = float(b.square().mean()), float((a - b).square().mean())
    if error != error:  # not a number: where the reference has none either, nothing can be said
        return 0.0 if of != of else float("inf")
    return (error / of) ** 0.5 if of > 0 else (0.0 if error == 0 else float("inf"))


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a large tensor, so that a comparison takes little memory."""
    if tensor.numel() <= _COMPARED:
        return tensor
    return tensor.take(torch.randint(tensor.numel(), (_COMPARED,), generator=torch.Generator().manual_seed(0)))
