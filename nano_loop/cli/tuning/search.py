"""The search for the fastest options of a script: each candidate runs it twice, in two rounds of opposite order."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_loop.cli.tuning.candidates import OF_NUMBERS, Changes, candidates
from nano_loop.cli.tuning.in_script import LEAST, WARMUP
from nano_loop.cli.tuning.result import Row, Tuning, as_text, differing
from nano_loop.cli.tuning.script_trial import TrialFailedError, trial_of
from nano_loop.config.environment import option_of
from nano_loop.cpu.waits import BUSY
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.runtime.settings import Settings

#: What the ambient mode does not do, which is for one process.
_OF_PROCESSES = ("num_processes", "cpu_for_each_process", "distributed_backend", "process_group_backend")
#: How many times as fast as the options as they are a candidate has to be; and how slow one is not run again.
PAYS, HOPELESS = 1.02, 1.4
#: The largest error of the loss, relative to fp64, with which a candidate may be chosen. A model that computes
#: something else under autocast does so by hand as well, so `verify` finds no fault there.
TOLERANCE = 0.1
#: The seconds for which a trial takes steps, and those that the first one may take.
_SHORTEST, _LONGEST, _FIRST = 0.5, 5.0, 600.0


class Search:
    """One search.

    Parameters
    ----------
    name : str
        The script.
    command : sequence of str
        What runs it.
    environ : mapping
        Its environment. Options that are set there stay as they are.
    seconds : float
        How long the search may take, about.
    """

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], seconds: float) -> None:
        self._name, self._command, self._environ = name, command, environ
        self._began, self._seconds = time.monotonic(), seconds
        self._own, self._plain = Row({}), Row({}, plain=True)
        self._rows = [self._own, self._plain]
        self._of_trial = _SHORTEST  # seconds of steps
        self._limit = _FIRST  # seconds of a trial
        self._waits: list[float] = []
        self._remarks: list[str] = []
        self._compared: list[Changes] = []  # numbers that `verify` was asked about
        #: Whether Ctrl-C has ended it.
        self.is_interrupted = False

    def run(self) -> Tuning:
        """Run the script under each candidate, and return the result; after Ctrl-C that of what was measured.

        Raises
        ------
        TrialFailedError
            If the script fails as it is.
        NanoConfigError
            If it trains nothing, or takes too few steps.
        KeyboardInterrupt
            If Ctrl-C comes before the script has run as it is.
        """
        self._say("as it is")
        answer = self._first()
        self._begin(answer)
        try:
            self._measure()
            chosen = self._chosen(compares=True)
        except KeyboardInterrupt:
            self.is_interrupted = True
            self._remarks.append("Interrupted: not everything was measured, and no numbers were compared.")
            for row in self._rows:
                row.note = row.note or ("" if row.seconds else "not measured: interrupted")
            chosen = self._chosen(compares=False)
        return self._result(chosen)

    def _first(self) -> dict[str, Any]:
        """Return what the script answers as it is."""
        try:
            answer = self._trial(self._own, _LONGEST)
        except TrialFailedError as error:
            if error.code:
                raise
            if error.code is None:
                raise NanoError(str(error)) from error
            got, expected = f"{self._name} has trained nothing", "tune times steps of an optimizer of torch"
            raise NanoConfigError(error_message(got, expected, "Name a script that trains")) from error
        if answer["seconds"] is None:
            got, expected = f"{self._name} takes {answer['steps']} steps", f"tune needs {WARMUP + LEAST}"
            raise NanoConfigError(error_message(got, expected, "Let it train longer"))
        return answer

    def _begin(self, answer: Mapping[str, Any]) -> None:
        """Choose the candidates by what the script has answered as it is, and the time of a trial."""
        self._is_explicit, self._written = answer["is_explicit"], answer["written"]
        self._start = Settings.read({**answer["options"], "verbose": True})  # the trials are quiet
        fixed = {option_of(setting.partition("=")[0]) for setting in self._start.options.from_environment}
        fixed |= set() if self._is_explicit else {*_OF_PROCESSES}
        self._rows += [Row(changes) for changes in candidates(self._start, fixed, answer)]
        left = self._began + self._seconds - time.monotonic()
        share = left / (2 * len(self._rows))  # the first trial is done, and the comparison is not
        start = max(answer["took"] - _LONGEST, 0.0)
        self._of_trial = min(max(share - start, _SHORTEST), _LONGEST)
        self._limit = 3 * answer["took"] + 30.0
        self._own.seconds.clear()  # it ran for longer than the others will

    def _measure(self) -> None:
        """Run all rows in two rounds; the second is for those that are not much slower."""
        self._round(self._rows)
        slow = HOPELESS * (self._own.seconds[0] if self._own.seconds else float("inf"))
        for row in self._rows[2:]:
            if row.seconds and row.seconds[0] > slow:
                row.note = row.note or "slower"
        self._round([row for row in reversed(self._rows) if not row.note])

    def _round(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows):
            self._say(f"{number + 1} of {len(rows)}: {row.name}")
            try:
                answer = self._trial(row, self._of_trial)
            except TrialFailedError as error:
                row.seconds.clear()
                row.note = str(error).strip().partition("\n")[0]
                continue
            row.note = row.note or _without_effect(row.options, answer["report"])

    def _trial(self, row: Row, seconds: float, **others: Any) -> dict[str, Any]:
        answer = trial_of(
            self._command,
            self._environ,
            {**row.options, **others, "verbose": False},
            seconds=seconds,
            limit=self._limit,
            is_plain=row.plain,
        )
        if answer["seconds"] is None:
            if row is not self._own:
                raise TrialFailedError(f"it took {answer['steps']} steps")
            return answer
        processes = row.options.get("num_processes") or answer["options"].get("num_processes") or 1
        row.seconds.append(answer["seconds"] / (1 if row.plain else processes))
        row.memory = max(row.memory or 0, answer["peak"])
        self._waits += [answer["waits"] or 0.0]
        return answer

    def _chosen(self, *, compares: bool) -> Row:
        """Return the fastest row with the same batches and with numbers that differ by rounding alone."""
        for row in self._rows:
            row.measure(self._own, self._plain)
        paying = [
            row
            for row in self._rows[2:]
            if row.seconds and not row.note and "num_processes" not in row.options and row.pays(self._own, PAYS)
        ]
        for row in sorted(paying, key=lambda row: row.milliseconds or 0.0):
            if compares:
                self._compare(row)
            if not row.note:
                return row
        return self._own

    def _compare(self, row: Row) -> None:
        """Compare the numbers of a candidate, and of those with the same ones, with fp32, once."""
        if _numbers(row) in self._compared:
            return
        self._compared.append(_numbers(row))
        self._say(f"comparing numbers: {row.name}")
        changes = {**row.options, "verify": True, "num_processes": 1, "verbose": False}
        try:
            comparison = trial_of(self._command, self._environ, changes, seconds=0.0, limit=self._limit, compares=True)
        except TrialFailedError as error:
            comparison = {"remark": str(error)}
        if remark := comparison.get("remark"):
            self._remarks.append(f"The numbers of {row.name} were not compared with fp32: {remark}.")
        for other in self._rows[2:]:
            if _numbers(other) == _numbers(row):
                other.loss, other.gradients = comparison.get("loss"), comparison.get("gradients")
                if fault := comparison.get("fault"):
                    other.note = f"not exact: {fault} is off by more than rounding"
                elif (other.loss or 0.0) > TOLERANCE:
                    other.note = f"not exact: the loss is off by {other.loss:.0%}"

    def _result(self, chosen: Row) -> Tuning:
        options = self._start.changed(**chosen.options).options
        before, after = self._written
        values = differing(options)
        waits = statistics.fmean(self._waits or [0.0])
        return Tuning(
            options=values,
            line=f"{before}{as_text(values)}{after}",
            rows=self._rows,
            chosen=self._rows.index(chosen),
            seconds=time.monotonic() - self._began,
            changes=chosen.options,
            remarks=[*self._remarks, *self._more_remarks(options.num_processes or 1, chosen, waits)],
            waits=waits,
            date=time.strftime("%Y-%m-%d %H:%M"),
        )

    def _more_remarks(self, count: int, chosen: Row, waits: float) -> Iterator[str]:
        if chosen.speed_up is not None and chosen.speed_up < 1 / PAYS:
            times = f"{1 / chosen.speed_up:.2f} times as fast"
            yield f"The loop without nano_loop is {times}: its steps are too short for any option to pay."
        if count > 1:
            yield f"With {count} processes a step takes {count} batches of the loader. Times are of one batch."
        others = [row for row in self._rows[2:] if "num_processes" in row.options and row.milliseconds]
        for row in others:
            row.note = row.note or "other batches"
            gain = (chosen.milliseconds or 0.0) / (row.milliseconds or 1.0)
            if gain >= PAYS:
                yield f"{row.name} is {gain:.2f} times as fast as the choice, with other batches."
        if waits >= BUSY:
            yield f"Threads waited {waits:.0%} of their runnable time for other programs: these times are unsure."

    def _say(self, what: str) -> None:
        print(f"tune: {what}", file=sys.stderr, flush=True)


def _numbers(row: Row) -> Changes:
    """Return the options of a row that change its numbers."""
    return {name: value for name, value in row.options.items() if name in OF_NUMBERS}


def _without_effect(changes: Changes, steps: Mapping[str, Sequence[str]]) -> str:
    """Return why a change has no effect: its step was skipped."""
    for name, value in changes.items():
        status, detail, _ = steps.get(name, ["", "", ""])
        if status == "skipped" and value not in (False, None, "auto"):
            return f"no effect: {detail}"
    return ""
