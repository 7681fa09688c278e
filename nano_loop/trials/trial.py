"""What a process of a trial does: it runs the user's loop under some options, and takes steps when it is asked to."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from nano_loop.cpu import peak_memory
from nano_loop.distributed.launch.local.throwaway import Line
from nano_loop.distributed.payload.payload import load
from nano_loop.distributed.ranks import Loop
from nano_loop.distributed.seat import Seat
from nano_loop.errors import NanoError, problem
from nano_loop.run import Run, RunTask
from nano_loop.settings import Settings
from nano_loop.steps import STEPS, GradientAveraging

#: Steps before a trial answers for the first time: page faults, kernels that are made, compilation.
FIRST_STEPS = 2


class _EnoughStepsError(BaseException):
    """Leaves the user's loop, through handlers for `Exception`."""


class Trial(RunTask):
    """The task of a run, repeated until the process is ended.

    Parameters
    ----------
    payload : pathlib.Path
        Where the task was written to, by `nano_loop.distributed.payload.payload.dump`.
    settings : Settings
        The options of the trial.
    is_plain : bool
        Whether the loop runs without any step of nano_loop.
    verifies : bool
        Whether the trial compares the first batch with the plain model, answers with that, and ends.
    """

    def __init__(self, payload: Path, settings: Settings, *, is_plain: bool = False, verifies: bool = False) -> None:
        super().__init__(settings, {}, Loop("the loop", "nano_loop"))
        self._payload = payload
        self._verifies = verifies
        self._gate: _Gate | None = None
        self.steps = (GradientAveraging,) if is_plain else STEPS

    def run_in(self, seat: Seat) -> Any:
        """See `RunTask.run_in`."""
        line = Line(seat)
        self._gate = _Gate(line, ends_after=1 if self._verifies else None)
        run = Run(self.settings, self, seat=seat)
        run.complete()
        line.say(comparison=_comparison(run))

    def do(self, run: Run) -> Any:
        """See `RunTask.do`."""
        gate, task = self._gate, load(self._payload)
        assert gate is not None
        gate.begin(run)
        try:
            task.do(run)
            while gate.took_steps():
                task.repeat(run)
        except _EnoughStepsError:
            return
        finally:
            gate.close()
        given = "the loop has returned without a step of an optimizer"
        raise NanoError(problem(given, "a trial times steps", "Call optimizer.step() in the loop"))


class _Gate:
    """Counts the steps of the first optimizer, and stops the loop at the end of those that were asked for."""

    def __init__(self, line: Line, ends_after: int | None) -> None:
        self._line = line
        self._ends_after = ends_after
        self._left = FIRST_STEPS
        self._place = os.getpid(), threading.get_ident()
        self._optimizer: Optimizer | None = None
        self._seconds: list[float] = []
        self._taken = 0
        self._run: Run | None = None
        self._last = time.perf_counter()
        self._hook = register_optimizer_step_post_hook(self._note)

    def begin(self, run: Run) -> None:
        """Take note of the run, whose report is in the answers."""
        self._run, self._last = run, time.perf_counter()

    def took_steps(self) -> bool:
        """Whether there was a step since the last call. The loop may go on with another optimizer."""
        taken, self._taken, self._optimizer = self._taken, 0, None
        return taken > 0

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if (os.getpid(), threading.get_ident()) != self._place:
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._taken += 1
        self._left -= 1
        if self._ends_after is not None and self._taken >= self._ends_after:
            raise _EnoughStepsError
        if not self._left:
            self._answer()
        self._last = time.perf_counter()

    def _answer(self) -> None:
        self._line.say(seconds=self._seconds, peak=peak_memory(), steps=_steps(self._run))
        self._seconds = []
        self._left = self._line.wait()


def _steps(run: Run | None) -> dict[str, list[str]]:
    """Return the status and the detail of each step in the report of a run."""
    report = None if run is None else run.report
    return {} if report is None else {each.name: [each.status, each.detail] for each in report.results}


def _largest(errors: Iterable[float]) -> float | None:
    """Return the largest error; None if there is none, or one is not finite, which JSON does not know."""
    known = [*errors]
    return max(known) if known and all(map(math.isfinite, known)) else None


def _comparison(run: Run) -> Mapping[str, Any] | None:
    """Return what `verify` has found: for each model the fault, and the largest errors."""
    try:
        result = run.report["verify"] if run.report is not None else None
    except KeyError:
        return None
    if result is None or result.data is None:
        return {"remark": "" if result is None else result.detail}
    found = [*result.data.values()]
    return {
        "fault": next((each.fault for each in found if not each.ok), None),
        "loss": _largest(each.loss.error for each in found),
        "gradients": _largest(row.error for each in found for row in each.gradients),
        "remark": "",
    }
