"""Finds the fastest options: from the user's own on, stage by stage, the best of each stage goes on into the next.

A product of all options would take hours. A later stage is measured with the best options of the stages before it, so
what is missed is a pair of options that is faster together, and slower each by itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from nano_loop.cpu.cgroup import read_memory_limit
from nano_loop.cpu.tree import Tree
from nano_loop.distributed.launch.local.throwaway import TrialFailedError, server_of_trials
from nano_loop.distributed.payload.payload import dump
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.run import RunTask
from nano_loop.settings import Settings
from nano_loop.trials.candidates import (
    STAGES,
    Changes,
    Stage,
    alternatives,
    as_text,
    changed,
    differing,
    effective,
    for_trial,
)
from nano_loop.trials.clock import Clock
from nano_loop.trials.exactness import Exactness
from nano_loop.trials.live import LiveTrial, Measured
from nano_loop.trials.progress import Progress
from nano_loop.trials.race import Race
from nano_loop.trials.tuning import Row, Tuning

#: Seconds of a search, by default.
SECONDS = 90.0
#: How many times as fast as the best so far a candidate has to be, in nearly all turns, to replace it.
PAYS = 1.02
#: Part of the memory that is free which the trials at one time may take.
_MEMORY = 0.7
#: What a stage is worth beginning with: seconds, and steps of the best trial, which are some of two trials.
_LEAST, _STEPS = 3.0, 8
#: Part of the time in which a comparison of numbers has to end.
_COMPARISON = 0.35
_SLOWER, _NO_TIME = "slower", "not measured: no time was left"


class Search:
    """One search.

    Parameters
    ----------
    task : RunTask
        The user's loop.
    settings : Settings
        The options that it begins with.
    fixed : collection of str
        The names of options that stay as they are.
    seconds : float
        How long it may take, about.
    """

    def __init__(self, task: RunTask, settings: Settings, fixed: Collection[str], seconds: float = SECONDS) -> None:
        self._task = task
        self._start = settings
        self._fixed = fixed
        self._clock = Clock(seconds)
        self._all: list[Measured] = []
        self._changes: Changes = {}
        self._exactness = Exactness(self._start, self._compared)

    def run(self) -> Tuning:
        """Search, and return what was found. The user's objects and the files stay as they are.

        Raises
        ------
        NanoError
            If the loop cannot be copied, or fails also without a change of its options.
        """
        with ExitStack() as stack:
            self._stack = stack
            self._progress = Progress(self._clock.seconds)
            stack.callback(self._progress.close)
            base = for_trial(self._start)
            self._server, folder = stack.enter_context(server_of_trials(base.options, base.machine))
            self._payload = folder / "loop"
            self._payload.mkdir()
            self._progress.at(0, "a copy of the loop")
            dump(self._task, self._payload, self._task.names)
            best = self._first()
            for stage in STAGES:
                best = self._stage(stage, best)
            best.end()
        return self._found(best.measured)

    # --- stages ---

    def _first(self) -> LiveTrial:
        """Return the trial of the options as they are. The loop without nano_loop is timed in the first stage."""
        own = self._started(Measured({}))
        if own is None:
            given = f"the loop fails in a trial: it {self._all[-1].note}"
            needed = "a trial calls it on copies, in another process, and repeats it"
            raise NanoError(problem(given, needed, "Run it without tune to see the error"))
        return own

    def _stage(self, stage: Stage, best: LiveTrial) -> LiveTrial:
        """Return the fastest of the best trial so far and of what a stage varies."""
        now = changed(self._start, self._changes).options
        wanted = alternatives(stage.name, now, self._start.machine, best.measured.steps, self._task.parts)
        others = [Measured({**self._changes, **each}) for each in wanted if effective(each, now, self._fixed)]
        is_first = stage is STAGES[0]
        if is_first:
            others.insert(0, Measured({}, is_plain=True))
        if not others:
            return best
        begins, left = time.monotonic(), self._clock.left
        if left < max(_LEAST, _STEPS * (best.measured.median or 0.0)):
            for each in others:
                each.note = _NO_TIME
            self._all += others
            return best
        until = begins + stage.share * left
        fastest = self._raced(stage.name, best, others, until)
        while fastest is not best and not self._exactness.holds(fastest.measured, self._all):
            fastest = self._second(fastest, best)
        if fastest is not best:
            best.end()
            self._changes = fastest.measured.changes
        return fastest

    def _raced(self, name: str, best: LiveTrial, others: Sequence[Measured], until: float) -> LiveTrial:
        """Let candidates run against the best one so far, as many at a time as the memory allows."""
        waiting, first = list(others), best
        while waiting:
            count = self._fitting(waiting, best)
            group, waiting = waiting[:count], waiting[count:]
            self._progress.at(self._clock.spent, name)
            trials = {id(each): trial for each in group if (trial := self._started(each, until)) is not None}
            best = self._race(best, trials, until, keep=best is first)
        return best

    def _race(self, best: LiveTrial, trials: dict[int, LiveTrial], until: float, keep: bool) -> LiveTrial:
        mine, live = id(best.measured), {**trials, id(best.measured): best}

        def dropped(name: str, reason: str) -> None:
            trial = live.pop(int(name))
            trial.measured.note = reason or ("" if trial.measured.is_plain else _SLOWER)
            trial.end()

        def clock() -> float:
            self._progress.at(self._clock.spent)
            return time.monotonic()

        measured = {str(key): each.measured for key, each in live.items()}
        plain = next((name for name, each in measured.items() if each.is_plain), None)
        runners = {str(key): each for key, each in live.items()}
        race = Race(runners, until, dropped, (TrialFailedError,), clock, beside=plain)
        ranking = race.run(keep=str(mine))
        self._note(race, measured, str(mine))
        if not ranking:
            raise NanoError(problem("all trials have ended", "the loop must take steps", "Run it without tune"))
        winner = next((each for each in ranking if not measured[each].is_plain), ranking[0])
        if str(mine) in ranking and winner != str(mine) and not race.wins(winner, str(mine), PAYS):
            winner = str(mine)
        for name in ranking:
            if name not in (winner, str(mine)):
                dropped(name, "")
        return live[int(winner)]

    def _note(self, race: Race, measured: dict[str, Measured], mine: str) -> None:
        """Take the times and the speeds of a race into what is known of its candidates."""
        plain = next((name for name, each in measured.items() if each.is_plain and race.turns[name]), None)
        own = measured[mine]
        if own.speed is None and race.turns[mine]:
            own.speed = race.ratio(mine, plain) if plain else 1.0
        for name, each in measured.items():
            each.seconds += race.turns[name]
            if name != mine and race.turns[name] and race.turns[mine] and own.speed is not None:
                each.speed = 1.0 if each.is_plain else own.speed * race.ratio(name, mine)

    # --- trials ---

    def _started(self, measured: Measured, until: float | None = None) -> LiveTrial | None:
        """Start a trial, and wait for its first steps; None if it fails, or if its options have no effect."""
        self._all.append(measured)
        try:
            settings = changed(for_trial(self._start), measured.changes)
            trial = LiveTrial(measured, settings, self._server, self._payload)
        except (TrialFailedError, NanoConfigError) as error:
            measured.note = _first_line(error)
            return None
        self._stack.callback(trial.end)
        try:
            trial.ready(max((until or self._clock.until) - time.monotonic(), 10.0 if until else 60.0))
        except TrialFailedError as error:
            measured.note = _first_line(error)
        else:
            measured.note = self._without_effect(measured)
        if measured.note:
            trial.end()
            return None
        return trial

    def _without_effect(self, measured: Measured) -> str:
        """Return why a change has no effect: its step was skipped."""
        for name, value in measured.changes.items():
            status, detail = measured.steps.get(name, ["", ""])
            if status == "skipped" and value and value != self._changes.get(name):
                return f"no effect: {detail}"
        return ""

    def _fitting(self, waiting: Sequence[Measured], best: LiveTrial) -> int:
        """Return how many trials may live beside the best one."""
        each = max((one.memory or 0 for one in self._all), default=0)
        free = psutil.virtual_memory().available
        limit = read_memory_limit(Tree("/"))
        free = min(free, free if limit is None else max(limit - 2 * each, 0))
        return max(1, min(len(waiting), int(_MEMORY * free / max(each, 1))))

    # --- numbers ---

    def _compared(self, settings: Settings, measured: Measured) -> dict[str, Any]:
        self._progress.at(self._clock.spent, "comparison with fp32")
        one = changed(settings, {"verify": True, "num_processes": None})
        try:
            trial = LiveTrial(Measured(measured.changes), one, self._server, self._payload, verifies=True)
        except (TrialFailedError, NanoConfigError) as error:
            return {"remark": _first_line(error)}
        try:
            return trial.compared(max(_COMPARISON * self._clock.seconds, 10.0))
        except TrialFailedError as error:
            return {"remark": _first_line(error)}
        finally:
            trial.end()

    def _second(self, failed: LiveTrial, best: LiveTrial) -> LiveTrial:
        """Return the trial of the next best candidate, whose processes have ended, or the best so far."""
        failed.end()
        rest = [each for each in self._exactness.not_faulty(self._all) if each.speed and not each.is_plain]
        fastest = max(rest, key=lambda each: each.speed or 0.0, default=best.measured)
        if fastest is best.measured or (fastest.speed or 0.0) < PAYS * (best.measured.speed or 1.0):
            return best
        trial = self._started(Measured(fastest.changes, seconds=fastest.seconds, speed=fastest.speed))
        self._all.remove(fastest)
        return trial or best

    # --- the result ---

    def _found(self, best: Measured) -> Tuning:
        options = changed(self._start, best.changes).options
        before, after = self._task.written
        values = differing(options)
        remarks = [*_remarks(options, best)]
        return Tuning(
            options=values,
            line=f"{before}{as_text(values)}{after}",
            rows=[Row.of(each, self._start.options) for each in self._all],
            chosen=self._all.index(best),
            seconds=self._clock.spent,
            changes=best.changes,
            remarks=remarks,
        )


def _remarks(options: Any, best: Measured) -> Sequence[str]:
    found = []
    if best.speed is not None and best.speed < 1 / PAYS:
        times = f"{1 / best.speed:.2f} times as fast"
        found.append(f"The loop without nano_loop is {times}: its steps are too short for any option to pay.")
    count = options.num_processes or 1
    if count > 1:
        found.append(f"With {count} processes a step takes {count} batches of the loader. Times are of one batch.")
    if best.comparison and best.comparison.get("remark"):
        found.append(f"The numbers were not compared with fp32: {best.comparison['remark']}.")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
