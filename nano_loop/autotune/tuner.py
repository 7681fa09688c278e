"""Times algorithms that compute the same in turn, and keeps the fastest one that is as exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_loop.autotune.budget import Budget
from nano_loop.autotune.choices import Choice, Choices

#: Computes once, and returns all that is computed.
Algorithm = Callable[[], Sequence[Tensor]]

#: How many times as fast as another an algorithm has to be to replace it, and as slow to be measured no further.
PAYS, HOPELESS = 1.05, 1.3
#: In which share of the rounds it has to be faster: in all of three.
NEARLY_ALWAYS = 0.75
#: How often one is timed: at least, and at most while all timings together take less than `_ENOUGH`, in seconds.
_LEAST, _MOST, _ENOUGH = 3, 12, 0.004
#: The error that an algorithm may have in any case.
_TINY = 1e-3
#: How many elements of a tensor are compared.
_COMPARED = 1 << 16
#: How much longer than later an algorithm may take when it computes first.
_FAR = 2.0
#: What torch raises where it cannot compute something.
_FAILURES = (RuntimeError, MemoryError)
#: How far an algorithm may be from torch's where that is the reference: both round to bf16, by up to 2^-9.
_ROUNDING = 2.0**-7


class Race(NamedTuple):
    """The algorithms that compute something, and how exact they have to be.

    Attributes
    ----------
    algorithms : mapping of str to callable
        Compute it. They change nothing that others see.
    torchs : str
        The name of torch's own algorithm, which the others have to be as exact as.
    reference : callable or None
        Computes it with small errors only. None: what torch's algorithm computes is the reference.
    as_exact : float
        How many times as large as that of torch's algorithm the error of another may be, both against the reference.
    bound : float
        How large the error of another may be where torch's algorithm is the reference.
    pays : float
        How many times as fast as the guess an algorithm has to be to replace it.
    torchs_is_beaten : bool
        Whether that is said of torch's algorithm in place of the guess, because the others are less exact.
    overhead : float
        Seconds that a call by another algorithm than torch's takes besides, and which are not timed.
    """

    algorithms: Mapping[str, Algorithm]
    torchs: str
    reference: Algorithm | None
    as_exact: float = 1.2
    bound: float = _ROUNDING
    pays: float = PAYS
    torchs_is_beaten: bool = False
    overhead: float = 0.0


class Tuner:
    """Chooses between algorithms, for one run.

    Parameters
    ----------
    choices : Choices
        What was measured before.
    budget : Budget
        Says whether there is time for one more measurement.
    timer : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        choices: Choices,
        budget: Budget,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.use(choices)
        #: The seconds that measurements have taken.
        self.spent = 0.0
        #: What was measured in this run.
        self.new_choices: list[Choice] = []
        self._budget = budget
        self._timer = timer
        self._is_measuring = False

    @property
    def measured(self) -> int:
        """How many keys were measured in this run."""
        return len(self.new_choices)

    @property
    def replaced(self) -> int:
        """How often another algorithm than the guess was the fastest."""
        return sum(choice.algorithm != choice.guess for choice in self.new_choices)

    def use(self, choices: Choices) -> None:
        """Go on with choices for the number of threads that torch has now. For another one, nothing is measured."""
        self.choices = choices
        self.threads = torch.get_num_threads()

    def choose(self, key: str, guess: str, race: Callable[[], Race]) -> str | None:
        """Return the name of the algorithm to take, or None if it is not known yet, and `guess` is to be taken.

        Parameters
        ----------
        key : str
            What the fastest algorithm depends on.
        guess : str
            The algorithm to take without a measurement.
        race : callable
            Returns the race that measures the algorithms if there is time for it.
        """
        choice = self.choices.get(key)
        # What an algorithm calls while it is timed is measured where the loop calls it.
        is_usual = not self._is_measuring and self.threads == torch.get_num_threads()
        if choice is None and is_usual and self._budget.left() > 0:
            choice = self._measure(key, guess, race())
        return None if choice is None else choice.algorithm

    def _measure(self, key: str, guess: str, race: Race) -> Choice | None:
        begun, self._is_measuring = self._timer(), True
        try:
            choice = fastest(race, guess, self._budget.left(), self._timer)
        except _FAILURES:  # there may be memory for it later
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
    """Time algorithms in turn, and return the choice, or None if that would take longer than `seconds`.

    One that is less exact than torch's is omitted, and one that is far slower than another is timed no further. On a
    busy machine, each may be disturbed, so one replaces another only if it was faster nearly each time.
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
    """Whether an algorithm took far longer than another one. First times are not to be trusted otherwise."""
    return first[name] > _FAR * HOPELESS * first[beaten]


def _try_again(race: Race, first: dict[str, float], beaten: str, seconds: float, timer: Callable[[], float]) -> None:
    """Time algorithms once more that took far longer than another one, if there is time for it: one was disturbed."""
    for name in [name for name in first if _is_far(first, name, beaten)]:
        if first[name] <= seconds:
            start = timer()
            race.algorithms[name]()
            first[name] = min(first[name], timer() - start)
            seconds -= first[name]


def _timed(race: Race, beaten: str, in_time: list[str], timer: Callable[[], float]) -> dict[str, list[float]]:
    """Return the times of algorithms that have taken turns until the end; nothing where there is only one."""
    times: dict[str, list[float]] = {name: [] for name in in_time}
    begun = timer()
    for round_ in range(_MOST):
        if len(in_time) == 1 or (round_ >= _LEAST and timer() - begun > _ENOUGH):
            break
        for name in in_time[:: -1 if round_ % 2 else 1]:
            start = timer()
            race.algorithms[name]()
            times[name].append(timer() - start)
        if round_:  # one that was disturbed once has a second time
            best = min(min(times[name]) for name in in_time)
            in_time = [name for name in in_time if name == beaten or min(times[name]) <= HOPELESS * best]
    return {name: times[name] for name in in_time if times[name]}


def _is_faster(times: Sequence[float], of_beaten: Sequence[float], pays: float) -> bool:
    """Whether an algorithm was faster than another by enough, and nearly always."""
    wins = sum(a < b for a, b in zip(times, of_beaten, strict=True))
    return pays * min(times) < min(of_beaten) and wins >= NEARLY_ALWAYS * len(times)


def _as_exact(race: Race, timer: Callable[[], float], seconds: float) -> dict[str, float] | None:
    """Return torch's algorithm, and those that are as exact, each with the time that it took first.

    None if that would take longer than `seconds`. One that raises, as where there is no memory for it, is omitted.
    """
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
    """Some elements of a tensor, in fp32. The tensor is freed, so that a race takes the memory of one algorithm."""

    shape: torch.Size
    elements: Tensor


def _tried(algorithm: Algorithm, timer: Callable[[], float]) -> tuple[list[_Sample], float]:
    """Return samples of what an algorithm computes, and the time that it takes."""
    start = timer()
    computed = algorithm()
    took = timer() - start
    with torch.no_grad():
        return [_Sample(tensor.shape, _sample(tensor).float()) for tensor in computed], took


def _errors(computed: Sequence[_Sample], reference: Sequence[_Sample]) -> list[float]:
    """Return the rms of the difference of each tensor to that of the reference, in units of the reference's rms."""
    return [_error(a, b) for a, b in zip(computed, reference, strict=True)]


def _error(computed: _Sample, reference: _Sample) -> float:
    if computed.shape != reference.shape:
        return float("inf")
    a, b = computed.elements, reference.elements
    if not b.numel():
        return 0.0
    of, error = float(b.square().mean()), float((a - b).square().mean())
    if error != error:  # not a number: where the reference has none either, nothing can be said
        return 0.0 if of != of else float("inf")
    return (error / of) ** 0.5 if of > 0 else (0.0 if error == 0 else float("inf"))


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a large tensor, so that a comparison takes little memory."""
    if tensor.numel() <= _COMPARED:
        return tensor
    return tensor.take(torch.randint(tensor.numel(), (_COMPARED,), generator=torch.Generator().manual_seed(0)))
