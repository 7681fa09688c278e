"""The search for the fastest options: a fixed list of candidates, each timed in turn with the options as they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from nano_loop.config.declarations import MEASURING
from nano_loop.config.options import Options
from nano_loop.distributed.payload.payload import dump
from nano_loop.errors import NanoError, NanoWorkerError, error_message
from nano_loop.runtime.objects.report import print_lines
from nano_loop.runtime.run import RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.search.candidates import Changes, candidates
from nano_loop.search.key import key_of
from nano_loop.search.load import BUSY, load_of
from nano_loop.search.measured import EARLY, PAYS, Measured
from nano_loop.search.result import Row, Tuning, as_text, differing
from nano_loop.search.trial import Trial
from nano_loop.search.trial_processes import TrialFailedError, TrialProcesses, trial_server
from nano_loop.storage.cache_folder import JsonFile, cache_folder

#: Seconds of a search, by default.
SECONDS = 90.0
#: Turns of a candidate, and the seconds that one takes, at least.
TURNS, TURN = 10, 0.12
#: How many times as slow in each turn a candidate is that stops early.
_HOPELESS = 1.4
#: The part of the time for timing; the rest is for comparisons of numbers.
_TIMING = 0.8
#: What is left to begin a candidate with: seconds, and steps of the loop.
_LEAST, _STEPS = 3.0, 8
_FIRST = 10.0  # seconds that the loop without nano_loop may take, if less is left
_NOT_IN_TRIALS = dict.fromkeys(("verbose", *MEASURING), False)
_FORMAT = 3  # of the file of a kept result


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C in a search, with the result so far."""

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(f"\n{tuning}")
        self.tuning = tuning


def search(
    task: RunTask,
    settings: Settings,
    fixed: Collection[str],
    seconds: float = SECONDS,
    again: bool = False,
    verbose: bool = False,
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
    verbose : bool
        Whether to print a line where a search begins.

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
    tuning = Search(task, settings, fixed, seconds, verbose).run()
    if tuning.load < BUSY:
        file.write({"tuning": tuning.as_dict()})
    return tuning


class Search:
    """One search. Its arguments are those of `search`."""

    def __init__(
        self,
        task: RunTask | None,
        settings: Settings,
        fixed: Collection[str],
        seconds: float,
        verbose: bool = False,
    ) -> None:
        self._task = task
        self._written = RunTask.written if task is None else task.written
        self._start = settings
        self._fixed = fixed
        self._began = time.monotonic()
        self._seconds = seconds
        self._verbose = verbose
        self._own = Measured(Row({}))
        self._longest = 0.0  # seconds that a trial may take to begin, at the least
        self._measured = [self._own]  # then the loop without nano_loop, and the candidates
        self._loads: list[float] = []

    def run(self) -> Tuning:
        """Time the candidates, and return the result.

        Raises
        ------
        SearchInterrupted
            If Ctrl-C comes after the first candidate.
        """
        try:
            with ExitStack() as stack:
                chosen = self._measure(stack)
        except KeyboardInterrupt:
            if not self._own.seconds:
                raise
            for candidate in self._measured[1:]:
                del candidate.seconds[len(candidate.reference) :], candidate.reference[len(candidate.seconds) :]
                if not candidate.seconds and not candidate.row.note:
                    candidate.row.note = "not measured: interrupted"
            raise SearchInterrupted(self._result(self._own)) from None
        return self._result(chosen)

    def _measure(self, stack: ExitStack) -> Measured:
        """Time the candidates in processes that end with the stack, and return the one that is chosen."""
        self._prepare(stack)
        if self._verbose:
            print_lines([f"tune: timing candidates in other processes, for about {self._seconds:.0f} s"])
        self._note_load()
        with self._reference_fails():
            self._reference = stack.enter_context(self._trial(self._own))
            answer = self._reference.answers(max(self._left, 60.0))[0]
        self._measured.append(Measured(Row({}, plain=True)))
        proposals = candidates(self._start, self._fixed, answer, None if self._task is None else self._task.parts)
        self._measured += [Measured(Row(changes)) for changes in proposals]
        timed = self._measured[1:]
        for number, candidate in enumerate(timed):
            # Twice its share of what is left: most take less than theirs.
            share = 2 * (self._left - (1 - _TIMING) * self._seconds) / (len(timed) + 1 - number)
            self._time(candidate, max(share, _FIRST) if candidate.row.plain else share)
            self._note_load()
        return self._chosen(timed[1:])

    def _note_load(self) -> None:
        """Note how busy other programs keep the CPUs, while the options as they are wait for their next turn."""
        self._loads.append(load_of(self._start.machine.allowed))

    def _prepare(self, stack: ExitStack) -> None:
        assert self._task is not None
        base = self._start.changed(**_NOT_IN_TRIALS)
        self._server, folder = stack.enter_context(trial_server(base, self._task.modules))
        self._payload = folder / "loop"
        self._payload.mkdir()
        self._modules = dump(self._task, self._payload, self._task.names).modules

    def _begun(self, settings: Settings, *, is_plain: bool) -> Any:
        """Return the processes of a trial with these settings."""
        task = Trial(self._payload, settings, is_plain=is_plain)
        return TrialProcesses(self._server, task, self._modules, settings)

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
                steps = trial.answers(max(seconds, _FIRST, self._longest))[0]["steps"]
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
            seconds: float
            with self._reference_fails():
                seconds, self._own.row.memory = self._reference.take(count, max(self._left, 60.0))
            return seconds

        sides = ((take, candidate.seconds), (take_own, candidate.reference))
        turns = [(steps_of, max(1, round(TURN / max(steps_of(1), 1e-6))), times) for steps_of, times in sides]
        for number in range(TURNS):
            for steps_of, count, times in turns if number % 2 else turns[::-1]:
                times.append(steps_of(count))
            if number + 1 < EARLY:
                continue
            if max(candidate.ratios) * _HOPELESS < 1:
                candidate.row.note = "" if candidate.row.plain else "slower"
                break
            if time.monotonic() >= until:
                break
        self._own.seconds += candidate.reference

    @contextmanager
    def _trial(self, candidate: Measured, **others: Any) -> Iterator[Any]:
        """Give the processes of a candidate, with more changes of its options."""
        try:
            settings = self._start.changed(**{**_NOT_IN_TRIALS, **candidate.row.options, **others})
            trial = self._begun(settings, is_plain=candidate.row.plain)
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
            message = error_message(got, expected, "Run it without tune to see the error")
            failure = error.failure
            if failure is None or failure.traceback is None:
                raise NanoError(message) from error
            raise NanoWorkerError(
                f"{message}\n\n{failure.traceback.rstrip()}",
                rank=failure.rank,
                exitcode=failure.exitcode,
                traceback=failure.traceback,
            ) from error

    # --- numbers ---

    def _chosen(self, others: Sequence[Measured]) -> Measured:
        """Return the fastest candidate with the same batches and with numbers that differ by rounding alone."""
        paying = (other for other in others if other.pays and not other.changes_batch)
        for candidate in sorted(paying, key=lambda other: -(other.speed or 0.0)):
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
                comparison: dict[str, Any] = trial.answers(max(self._left, _FIRST, self._longest))[0]["comparison"]
                return comparison
        except TrialFailedError as error:
            return {"remark": _first_line(error)}

    # --- the result ---

    def _result(self, chosen: Measured) -> Tuning:
        options = self._start.changed(**chosen.row.options).options
        before, after = self._written
        values, load = differing(options), statistics.fmean(self._loads or [0.0])
        own_seconds = statistics.median(self._own.seconds or [0.0])
        own_speed = 1 / (self._measured[1].speed or 1.0)
        self._own.reference = [own_seconds] * len(self._own.seconds)
        rows = [candidate.finish(own_seconds, own_speed) for candidate in self._measured]
        remarks = [*_remarks(options, chosen.row.speed_up, chosen.remark), *self._of_other_batches(chosen)]
        if load >= BUSY:
            remarks.append(
                f"Other programs kept {load:.0%} of the CPUs busy: these times are unsure, and are not kept."
            )
        return Tuning(
            options=values,
            line=f"{before}{as_text(values)}{after}",
            rows=rows,
            chosen=self._measured.index(chosen),
            seconds=time.monotonic() - self._began,
            changes=chosen.row.options,
            remarks=remarks,
            load=load,
            date=time.strftime("%Y-%m-%d %H:%M"),
        )

    def _of_other_batches(self, chosen: Measured) -> Iterator[str]:
        """Mark the candidates with other batches, and yield a remark if one is faster than the choice."""
        others = [candidate for candidate in self._measured if candidate.changes_batch and candidate.seconds]
        for candidate in others:
            candidate.row.note = candidate.row.note or "other batches"
        fastest = max((other for other in others if other.pays), key=lambda other: other.speed or 0.0, default=None)
        gain = 0.0 if fastest is None else (fastest.speed or 0.0) / (chosen.speed or 1.0)
        if fastest is not None and gain >= PAYS:
            yield f"{fastest.row.name} is {gain:.2f} times as fast as the choice, with other batches."


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
