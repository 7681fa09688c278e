"""The search for the fastest options of a script. Each candidate runs it twice, in two rounds of opposite order.

The fastest options are saved for later runs of the script.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_loop.cli.script import Script
from nano_loop.cli.tuning import LEAST, WARMUP
from nano_loop.cli.tuning.candidates import OF_NUMBERS, Changes, candidates
from nano_loop.cli.tuning.result import INTERRUPTED, Row, Tuning, as_text, differing
from nano_loop.cli.tuning.trial import TrialFailedError, Trials, say
from nano_loop.config.options import Options
from nano_loop.cpu import read_machine
from nano_loop.cpu.process import BUSY
from nano_loop.errors import NanoConfigError, NanoError, error_message

#: Options that the ambient mode does not support, since it has one process.
_OF_PROCESSES = ("num_processes", "cpu_for_each_process", "distributed_backend", "process_group_backend")
#: The slowdown beyond which a candidate is not run again.
HOPELESS = 1.4
#: The largest error of the loss, relative to fp64, of a chosen candidate. A model that computes something else under
#: autocast also does so under torch's own autocast, so `verify` finds no fault there.
TOLERANCE = 0.1
#: Seconds: the shortest and the longest stepping time of a trial.
_SHORTEST, _LONGEST = 0.5, 5.0


class Search:
    """A search for the fastest options in about `seconds`; those of the environment or command line do not change."""

    def __init__(self, script: Script, seconds: float) -> None:
        self._name, self._trials = script.name, Trials(script)
        self._began, self._seconds = time.monotonic(), seconds
        self._own, self._plain = Row({}), Row({}, plain=True)
        self._rows = [self._own, self._plain]
        self._of_trial = _SHORTEST  # seconds of steps per trial
        self._waits: list[float] = []
        self._remarks: list[str] = []
        self._compared: list[Changes] = []  # changes that `verify` has compared
        #: Whether Ctrl-C has ended it.
        self.is_interrupted = False

    def run(self) -> Tuning:
        """Run the script with each candidate, and return the result; after Ctrl-C, the result so far.

        Raises a `TrialFailedError` if the unchanged script fails, and a `NanoConfigError` if it does not train long
        enough.
        """
        say(f"{self._name} unchanged, for {_LONGEST:.0f} s of steps")
        self._begin(self._trial(self._own, _LONGEST))
        try:
            self._measure()
            chosen = self._chosen()
        except KeyboardInterrupt:
            if not self._own.seconds:
                raise
            self.is_interrupted = True
            self._remarks.append("Interrupted: not everything was measured, and no results were compared.")
            for row in self._rows:
                row.note = row.note or ("" if row.seconds else INTERRUPTED)
            chosen = self._chosen()
        return self._result(chosen)

    def _begin(self, answer: Mapping[str, Any]) -> None:
        """Choose the candidates by the answer of the unchanged script, and the time per trial."""
        self._is_explicit, self._written, self._identity = answer["is_explicit"], answer["written"], answer["script"]
        self._options = Options.from_call(
            {**answer["options"], "verbose": True}, self._trials.environ
        )  # trials print nothing
        fixed = self._options.set_by_environment | (set() if self._is_explicit else {*_OF_PROCESSES})
        self._rows += [Row(changes) for changes in candidates(self._options, read_machine(), fixed, answer)]
        left = self._began + self._seconds - time.monotonic()
        share = left / (2 * len(self._rows))  # the first trial is done, the comparison is not
        start = max(answer["took"] - _LONGEST, 0.0)
        self._of_trial = min(max(share - start, _SHORTEST), _LONGEST)
        self._trials.limit = 3 * answer["took"] + 30.0
        self._own.seconds.clear()  # it ran longer than the other trials will

    def _measure(self) -> None:
        """Run all rows in two rounds; the second omits those that are much slower."""
        self._round(self._rows)
        slow = HOPELESS * (self._own.seconds[0] if self._own.seconds else float("inf"))
        for row in self._rows[2:]:
            if row.seconds and row.seconds[0] > slow:
                row.note = row.note or "slower"
        self._round([row for row in reversed(self._rows) if not row.note])

    def _round(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows):
            say(f"{number + 1} of {len(rows)}: {row.name}")
            try:
                answer = self._trial(row, self._of_trial)
            except TrialFailedError as error:
                if row is self._own:  # without it, nothing can be compared
                    raise
                row.seconds.clear()
                row.note = str(error).strip().partition("\n")[0]
                continue
            row.note = row.note or _without_effect(row.options, answer["report"])

    def _trial(self, row: Row, seconds: float) -> dict[str, Any]:
        try:
            answer = self._trials.answer(row.options, seconds=seconds, is_plain=row.plain)
        except TrialFailedError as error:
            if row is not self._own or error.code:
                raise
            if error.code is None:
                raise NanoError(str(error)) from error
            got, expected = f"{self._name} did not train", "tune times the steps of a torch optimizer"
            raise NanoConfigError(error_message(got, expected, "Name a script that trains")) from error
        if answer["seconds"] is None:
            steps, expected = f"{answer['steps']} steps", f"tune needs {WARMUP + LEAST}"
            if row is not self._own:
                raise TrialFailedError(f"it took {steps}, and {expected}")
            raise NanoConfigError(error_message(f"{self._name} takes {steps}", expected, "Let it train longer"))
        # If processes do not share batches, each takes one per step.
        processes = row.options.get("num_processes") or answer["options"].get("num_processes") or 1
        is_whole = row.plain or answer["options"].get("split_batches", False)
        row.seconds.append(answer["seconds"] / (1 if is_whole else processes))
        row.memory = max(row.memory or 0, answer["peak"])
        self._waits += [answer["waits"] or 0.0]
        return answer

    def _chosen(self) -> Row:
        """Return the fastest row, by more than noise unless interrupted, with the same batches and results."""
        for row in self._rows:
            row.measure(self._own, self._plain)
        others = self._with_other_batches()
        rows = [row for row in self._rows[2:] if row.seconds and not row.note and row not in others]
        if not self.is_interrupted:
            rows = [row for row in rows if row.pays(self._own, PAYS)]
        for row in sorted([self._own, *rows], key=lambda row: row.milliseconds or 0.0):
            if not (self.is_interrupted or row is self._own):
                self._compare(row)
            if not row.note:
                return row
        return self._own

    def _with_other_batches(self) -> list[Row]:
        """Return the rows that train on other batches than the unchanged script."""
        is_split = self._options.split_batches
        return [] if is_split else [row for row in self._rows[2:] if "num_processes" in row.options]

    def _compare(self, row: Row) -> None:
        """Compare a candidate's results with fp32 once, also for the candidates that compute the same results."""
        if _numbers(row) in self._compared:
            return
        self._compared.append(_numbers(row))
        say(f"comparing results: {row.name}")
        try:
            comparison = self._trials.answer(
                {**row.options, "verify": True, "num_processes": 1}, seconds=0.0, compares=True
            )
        except TrialFailedError as error:
            comparison = {"remark": str(error)}
        if remark := comparison.get("remark"):
            self._remarks.append(f"The results of {row.name} were not compared with fp32: {remark}.")
        for other in self._rows[2:]:
            if _numbers(other) == _numbers(row):
                other.loss, other.gradients = comparison.get("loss"), comparison.get("gradients")
                if fault := comparison.get("fault"):
                    other.note = f"not exact: {fault} is off by more than rounding"
                elif (other.loss or 0.0) > TOLERANCE:
                    other.note = f"not exact: the loss is off by {other.loss:.0%}"

    def _result(self, chosen: Row) -> Tuning:
        options = self._options.changed(chosen.options)
        before, after = self._written
        values = differing(options)
        waits = statistics.fmean(self._waits or [0.0])
        # Results measured on a busy machine, or of an interrupted search, are not saved.
        learnt = (
            ()
            if self.is_interrupted or waits >= BUSY or self._identity is None
            else save_fastest(self._rows, self._options, self._identity)
        )
        return Tuning(
            options=values,
            line=f"{before}{as_text(values)}{after}",
            rows=self._rows,
            chosen=self._rows.index(chosen),
            seconds=time.monotonic() - self._began,
            changes=chosen.options,
            remarks=[*self._remarks, *self._more_remarks(options.processes, chosen, waits), *learnt],
            waits=waits,
            date=time.strftime("%Y-%m-%d %H:%M"),
        )

    def _more_remarks(self, count: int, chosen: Row, waits: float) -> Iterator[str]:
        if chosen.speed_up is not None and chosen.speed_up < 1 / PAYS:
            times = f"{1 / chosen.speed_up:.2f} times as fast"
            yield f"The loop without nano_loop is {times}: its steps are too short to gain from any option."
        if count > 1 and not self._options.split_batches:
            yield f"With {count} processes, a step takes {count} batches of the loader. Times are per batch."
        for row in filter(lambda row: row.milliseconds, self._with_other_batches()):
            row.note = row.note or "other batches"
            gain = (chosen.milliseconds or 0.0) / (row.milliseconds or 1.0)
            if gain >= PAYS:
                yield f"{row.name} is {gain:.2f} times as fast as the choice, with other batches."
        if waits >= BUSY:
            busy = f"Threads waited {waits:.0%} of their runnable time for other programs"
            yield f"{busy}: these times are unreliable and were not saved."


def _numbers(row: Row) -> Changes:
    """Return the options of a row that change its results."""
    return {name: value for name, value in row.options.items() if name in OF_NUMBERS}


def _without_effect(changes: Changes, steps: Mapping[str, Sequence[str]]) -> str:
    """Return why a change has no effect because its step was skipped."""
    for name, value in changes.items():
        status, detail, _ = steps.get(name, ["", "", ""])
        if status == "skipped" and value not in (False, None, "auto"):
            return f"no effect: {detail}"
    return ""


#: The minimum speed-up of a candidate that is chosen or saved.
PAYS = 1.02
#: Options that later runs do not use automatically: they change the batches, or depend on software that may be gone.
_NOT_LEARNT = frozenset(("num_processes", "use_ipex", "compile"))


def save_fastest(rows: Sequence[Row], options: Options, script: str) -> Iterator[str]:
    """Save the fastest options in each precision, and yield a line about each; the first row is the script as is."""
    from nano_loop.runtime.settings import learn  # here, since it imports torch, which takes a second

    own, unchanged = options.precision, rows[0]
    rows = [row for row in rows if row.seconds and not (row.note or row.plain)]
    asked_for = {"num_processes": "auto", "split_batches": True} if options.num_processes == "auto" else {}
    rows = [row for row in rows if (_NOT_LEARNT - {*asked_for}).isdisjoint(row.options)]
    for precision in dict.fromkeys(row.options.get("precision", own) for row in rows):
        base = {} if precision == own else {"precision": precision}
        before = next((row for row in rows if row.options == base), None)
        faster = [row for row in rows if row.options.get("precision", own) == precision]
        faster = [row for row in faster if before is None or row.pays(before, PAYS)]
        best = min(faster, key=lambda row: row.milliseconds or 0.0, default=before or unchanged)
        changes = {"num_processes": 1} if asked_for else {}  # one process is a valid result
        changes |= {name: value for name, value in best.options.items() if name != "precision"}
        learn(read_machine(), script, options.changed(base), changes)
        if changes:
            written = as_text({"precision": precision, **asked_for})
            yield f"Later runs of this script with {written} use {as_text(changes)}."
