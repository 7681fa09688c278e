"""The search for the fastest options: a fixed list of candidates, each timed in turn with the options as they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from nano_loop.config.declarations import MEASURING
from nano_loop.config.options import Options
from nano_loop.distributed.payload.payload import dump
from nano_loop.errors import NanoError, error_message
from nano_loop.runtime.run import RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.search.candidates import OF_NUMBERS, Changes, candidates
from nano_loop.search.key import key_of
from nano_loop.search.result import Row, Tuning, as_text, differing
from nano_loop.search.trial import Trial
from nano_loop.search.trial_processes import TrialFailedError, TrialProcesses, trial_server
from nano_loop.storage.cache_folder import JsonFile, cache_folder

#: Seconds of a search, by default.
SECONDS = 90.0
#: How many times as fast as the options as they are a candidate has to be, and in what part of the turns faster.
PAYS, MOST_TURNS = 1.02, 0.75
#: Turns of a candidate, and the seconds that one takes, at least.
TURNS, TURN = 10, 0.12
#: After so many turns a candidate stops that was so many times as slow in each.
_EARLY, _HOPELESS = 3, 1.4
#: The part of the time for timing; the rest is for comparisons of numbers.
_TIMING = 0.8
#: The largest error of the loss, relative to fp64, with which a candidate may be chosen. A model that computes
#: something else under autocast does so by hand as well, so `verify` finds no fault there.
TOLERANCE = 0.1
#: What is left to begin a candidate with: seconds, and steps of the loop.
_LEAST, _STEPS = 3.0, 8
_FIRST = 10.0  # seconds that the loop without nano_loop may take, if less is left
_NOT_IN_TRIALS = dict.fromkeys(("verbose", *MEASURING), False)
_FORMAT = 2  # of the file of a kept result


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
        return len(self.ratios) >= _EARLY and often and (self.speed or 0.0) >= PAYS

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

    def finish(self, own_speed: float) -> Row:
        """Return the row with the times, by the speed of the options as they are over the loop without nano_loop."""
        times = [1e3 * step for step in self.seconds]
        if len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            self.row.spread = low, high
        if self.speed is not None:
            self.row.milliseconds = statistics.median(times)
            self.row.speed_up = 1.0 if self.row.plain else own_speed * self.speed
        return self.row


def search(
    task: RunTask, settings: Settings, fixed: Collection[str], seconds: float = SECONDS, again: bool = False
) -> Tuning:
    """Return the fastest options for a task, or what an earlier search for such a task has chosen.

    The user's objects and files stay as they are.

    Parameters
    ----------
    fixed : collection of str
        The options that stay as they are.
    seconds : float
        How long a search may take, about.
    again : bool
        Whether to search also if there was a search before.

    Raises
    ------
    NanoError
        If the loop cannot be copied, or fails also without a change of its options.
    """
    key, folder = key_of(task, settings, fixed), cache_folder()
    file = JsonFile(None if folder is None or key is None else folder / f"options-{key}.json", _FORMAT)
    with suppress(TypeError, KeyError, AttributeError):  # nothing is kept, or it is damaged
        if not again:
            return Tuning.of_dict({**file.read()["tuning"], "cached": True})
    tuning = Search(task, settings, fixed, seconds).run()
    file.write({"tuning": tuning.as_dict()})
    return tuning


class Search:
    """One search. Its arguments are those of `search`."""

    def __init__(self, task: RunTask, settings: Settings, fixed: Collection[str], seconds: float) -> None:
        self._task = task
        self._start = settings
        self._fixed = fixed
        self._began = time.monotonic()
        self._seconds = seconds
        self._own = Measured(Row({}))

    def run(self) -> Tuning:
        """Time the candidates, and return the result."""
        with ExitStack() as stack:
            base = self._start.changed(**_NOT_IN_TRIALS)
            self._server, folder = stack.enter_context(trial_server(base, self._task.modules))
            self._payload = folder / "loop"
            self._payload.mkdir()
            self._modules = dump(self._task, self._payload, self._task.names).modules
            with self._reference_fails():
                self._reference = stack.enter_context(self._trial(self._own))
                answer = self._reference.answers(max(self._left, 60.0))[0]
            plain = Measured(Row({}, plain=True))
            proposals = candidates(self._start, self._fixed, answer, self._task.parts)
            others = [Measured(Row(changes)) for changes in proposals]
            for number, candidate in enumerate([plain, *others]):
                # Twice its share of what is left: most take less than theirs.
                share = 2 * (self._left - (1 - _TIMING) * self._seconds) / (len(others) + 2 - number)
                self._time(candidate, max(share, _FIRST) if candidate is plain else share)
            return self._result(self._chosen(others), plain, others)

    @property
    def _left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    # --- times ---

    def _time(self, candidate: Measured, seconds: float) -> None:
        """Let a candidate and the options as they are take steps in turn; note the times, or why there are none."""
        own = statistics.median(self._own.seconds) if self._own.seconds else 0.0
        if seconds < max(_LEAST, _STEPS * own):
            candidate.row.note = "not measured: no time was left"
            return
        until = time.monotonic() + seconds
        try:
            with self._trial(candidate) as trial:
                steps = trial.answers(max(seconds, 10.0))[0]["steps"]
                candidate.row.note = _without_effect(candidate.row.options, steps)
                if not candidate.row.note:
                    self._take_turns(candidate, trial, until)
        except TrialFailedError as error:
            candidate.row.note = _first_line(error)
            candidate.seconds, candidate.reference = [], []

    def _take_turns(self, candidate: Measured, trial: TrialProcesses, until: float) -> None:
        def take(count: int) -> float:
            seconds, candidate.row.memory = trial.take(count, max(until - time.monotonic(), 10.0))
            return seconds

        def take_own(count: int) -> float:
            with self._reference_fails():
                seconds, self._own.row.memory = self._reference.take(count, max(self._left, 60.0))
            return seconds

        sides = ((take, candidate.seconds), (take_own, candidate.reference))
        turns = [(steps_of, max(1, round(TURN / max(steps_of(1), 1e-6))), times) for steps_of, times in sides]
        for number in range(TURNS):
            for steps_of, count, times in turns if number % 2 else turns[::-1]:
                times.append(steps_of(count))
            if number + 1 < _EARLY:
                continue
            if max(candidate.ratios) * _HOPELESS < 1:
                candidate.row.note = "" if candidate.row.plain else "slower"
                break
            if time.monotonic() >= until:
                break
        self._own.seconds += candidate.reference

    @contextmanager
    def _trial(self, candidate: Measured, **others: Any) -> Iterator[TrialProcesses]:
        """Give the processes of a candidate, with more changes of its options."""
        try:
            settings = self._start.changed(**{**_NOT_IN_TRIALS, **candidate.row.options, **others})
            task = Trial(self._payload, settings, is_plain=candidate.row.plain)
            trial = TrialProcesses(self._server, task, self._modules, settings)
        except (NanoError, OSError) as error:
            raise TrialFailedError(str(error)) from error
        with closing(trial):
            yield trial

    @contextmanager
    def _reference_fails(self) -> Iterator[None]:
        try:
            yield
        except TrialFailedError as error:
            got = f"the loop fails in a trial: it {_first_line(error)}"
            expected = "a trial calls it on copies, in another process, and repeats it"
            raise NanoError(error_message(got, expected, "Run it without tune to see the error")) from error

    # --- numbers ---

    def _chosen(self, others: Sequence[Measured]) -> Measured:
        """Return the fastest candidate that computes what the plain model does, but for rounding."""
        for candidate in sorted((other for other in others if other.pays), key=lambda other: -(other.speed or 0.0)):
            if not candidate.is_compared:
                comparison = self._comparison(candidate)
                for other in others:
                    if other.seconds and other.numbers == candidate.numbers:
                        other.compare(comparison)
            if not candidate.row.note:
                return candidate
        return self._own

    def _comparison(self, candidate: Measured) -> dict[str, Any]:
        try:
            with self._trial(candidate, verify=True, num_processes=None) as trial:
                comparison: dict[str, Any] = trial.answers(max(self._left, 10.0))[0]["comparison"]
                return comparison
        except TrialFailedError as error:
            return {"remark": _first_line(error)}

    # --- the result ---

    def _result(self, chosen: Measured, plain: Measured, others: Sequence[Measured]) -> Tuning:
        options = self._start.changed(**chosen.row.options).options
        before, after = self._task.written
        values, own_speed = differing(options), 1 / (plain.speed or 1.0)
        self._own.reference = self._own.seconds
        measured = [self._own, plain, *others]
        rows = [candidate.finish(own_speed) for candidate in measured]
        return Tuning(
            options=values,
            line=f"{before}{as_text(values)}{after}",
            rows=rows,
            chosen=measured.index(chosen),
            seconds=time.monotonic() - self._began,
            changes=chosen.row.options,
            remarks=[*_remarks(options, chosen.row.speed_up, chosen.remark)],
        )


def _without_effect(changes: Changes, steps: dict[str, list[str]]) -> str:
    """Return why a change has no effect: its step was skipped."""
    for name, value in changes.items():
        status, detail = steps.get(name, ["", ""])
        if status == "skipped" and value not in (False, None, "auto"):
            return f"no effect: {detail}"
    return ""


def _remarks(options: Options, speed: float | None, not_compared: str) -> Iterator[str]:
    if speed is not None and speed < 1 / PAYS:
        times = f"{1 / speed:.2f} times as fast"
        yield f"The loop without nano_loop is {times}: its steps are too short for any option to pay."
    count = options.num_processes or 1
    if count > 1:
        yield f"With {count} processes a step takes {count} batches of the loader. Times are of one batch."
    if not_compared:
        yield f"The numbers were not compared with fp32: {not_compared}."


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
