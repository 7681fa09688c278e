"""The task of a process of a trial: it runs the user's loop under some options, and takes steps when it is asked to."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.cpu import peak_memory
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Loop
from nano_loop.distributed.files.private_files import guard_files
from nano_loop.distributed.payload.payload import load
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.objects.optimizers import held_by, hook_after_steps
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.search.trial_processes import Line
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
        The options of the trial. With ``verify`` it compares the first batch with the plain model, answers, and ends.
    is_plain : bool
        Whether the loop runs without any step of nano_loop.
    """

    reads_more = True

    def __init__(self, payload: Path, settings: Settings, *, is_plain: bool = False) -> None:
        super().__init__(settings, {}, Loop("the loop", "nano_loop"))
        self._payload = payload
        self.steps = (GradientAveraging,) if is_plain else STEPS

    @override
    def run_in(self, slot: RankSlot) -> Any:
        self._line = Line.of(slot)
        run = Run(self.settings, self, slot=slot)
        run.complete()
        self._line.answer(comparison=comparison_in(run.report))

    @override
    def do(self, run: Run) -> Any:
        task = load(self._payload)
        guard_files()
        gate = Gate(self._line, lambda: run.report, at_first=_leave if self.settings.options.verify else None)
        try:
            task.do(run)
            while gate.took_steps():
                task.repeat(run)
        except _EnoughStepsError:
            return
        finally:
            gate.close()
        got = "the loop has returned without a step of an optimizer"
        raise NanoError(error_message(got, "a trial times steps", "Call optimizer.step() in the loop"))


def _leave() -> NoReturn:
    raise _EnoughStepsError


class Gate:
    """A hook that counts the steps of the first optimizer, and stops the loop at the end of those that were asked for.

    Parameters
    ----------
    line : Line
        Where it answers.
    report : callable
        Returns the report of the run, which its answers have.
    at_first : callable, optional
        Is called after the first step, in place of all that follows.
    """

    def __init__(
        self, line: Line, report: Callable[[], SetupReport | None], *, at_first: Callable[[], NoReturn] | None = None
    ) -> None:
        self._line, self._report, self._at_first = line, report, at_first
        self._left = FIRST_STEPS
        self._place = os.getpid(), threading.get_ident()
        self._optimizer: Optimizer | None = None
        self._seconds: list[float] = []
        self._took_steps = False
        self._last = time.perf_counter()
        self._hook = hook_after_steps(self._note)

    def took_steps(self) -> bool:
        """Whether there was a step since the last call. The loop may go on with another optimizer."""
        took_steps, self._took_steps, self._optimizer = self._took_steps, False, None
        return took_steps

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if (os.getpid(), threading.get_ident()) != self._place:
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._seconds.append(time.perf_counter() - self._last)
        self._took_steps = True
        self._left -= 1
        if self._at_first is not None:
            self._at_first()
        if not self._left:
            answer = {"steps": _steps(self._report()), "convolutions": _has_convolutions(optimizer)}
            self._line.answer(seconds=self._seconds, peak=peak_memory(), **answer)
            self._seconds = []
            self._left = self._line.wait()
        self._last = time.perf_counter()


def _steps(report: SetupReport | None) -> dict[str, list[str]]:
    """Return the status and the detail of each step in the report of a run."""
    return {} if report is None else {result.name: [result.status, result.detail] for result in report.results}


def _has_convolutions(optimizer: Optimizer) -> bool:
    return any(parameter.dim() in (4, 5) for parameter in held_by(optimizer))


def _largest(errors: Iterable[float]) -> float | None:
    """Return the largest error; None if there is none, or one is not finite, which JSON does not know."""
    known = [*errors]
    return max(known) if known and all(map(math.isfinite, known)) else None


def comparison_in(report: SetupReport | None) -> dict[str, Any]:
    """Return what `verify` says: the fault, if there is one, and the largest errors, or why nothing is compared."""
    try:
        result = report["verify"] if report is not None else None
    except KeyError:
        result = None
    if result is None or result.data is None:
        return {"remark": "nothing was compared" if result is None else result.detail}
    models = [*result.data.values()]
    return {
        "fault": next((model.fault for model in models if not model.ok), None),
        "loss": _largest(model.loss.error for model in models),
        "gradients": _largest(row.error for model in models for row in model.gradients),
    }
