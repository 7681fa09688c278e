"""The part of `nano-loop tune` and `profile` in the script's process: measure steps, then end the process."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NoReturn

from torch.optim import Optimizer

from nano_loop.autotune.choices import save_all
from nano_loop.cli.tuning import LEAST, WARMUP
from nano_loop.config.protocol import Command, is_json, take_command
from nano_loop.cpu import peak_memory
from nano_loop.cpu.process import BUSY, Waits
from nano_loop.errors import NanoError
from nano_loop.patching.optimizers import called_after_steps, held_by
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.run import Run, active_run
from nano_loop.runtime.settings import script_of_process


def begin_requested(install: Callable[[], None], uninstall: Callable[[], None], *, is_explicit: bool) -> None:
    """Measure the steps of this thread's first optimizer if a command requests it; install options unless explicit."""
    command = take_command()
    if command is None:
        return
    if command.arguments["installs"] and not is_explicit:
        try:
            install()
        except NanoError as error:
            command.end(error=str(error))
    if command.name == "tune":
        _Timer(command, uninstall, is_explicit=is_explicit)
    else:
        from nano_loop.profiling.recorder import Recorder  # here, since it imports torch's profiler

        Recorder(command)


class _Timer:
    """Time the steps of one optimizer, and answer after enough time or when the script ends."""

    def __init__(self, command: Command, uninstall: Callable[[], None], *, is_explicit: bool) -> None:
        self._command, self._uninstall, self._is_explicit = command, uninstall, is_explicit
        self._place = os.getpid(), threading.get_ident()
        self._optimizer: Optimizer | None = None
        self._run: Run | None = None  # may end before the script does
        self._seconds: list[float] = []
        self._waits = Waits()
        self._began = self._last = time.perf_counter()
        self._hooks = ExitStack()  # never closed: the process ends
        self._hooks.enter_context(called_after_steps(self._note))
        self._script: str | None = None
        atexit.register(self._answer_at_end)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        run = active_run()
        if (os.getpid(), threading.get_ident()) != self._place or (self._is_explicit and run is None):
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._run = run
        if self._command.arguments["compares"]:
            self._compare(run)
        now = time.perf_counter()
        if self._seconds:
            self._seconds.append(now - self._last)
        else:  # the time before the first step is not a step
            self._seconds, self._began = [0.0], now
            self._script = script_of_process()  # now, since Python forgets its path before the exit functions
        enough = now - self._began >= self._command.arguments["seconds"]
        if enough and len(self._seconds) >= WARMUP + LEAST:
            self._command.end(result=self._times())
        self._last = time.perf_counter()

    def _times(self) -> dict[str, Any]:
        weights = () if self._optimizer is None else held_by(self._optimizer)
        waits = self._waits.share()
        save_all(is_busy=(waits or 0.0) >= BUSY)
        later = self._seconds[max(WARMUP, len(self._seconds) // 2) :]
        return {
            "steps": len(self._seconds),
            "seconds": _mean_without_pauses(later) if len(later) >= LEAST // 2 else None,
            "peak": peak_memory(),
            "waits": waits,
            "script": self._script,
            "has_convolutions": any(weight.dim() in (4, 5) for weight in weights),
            **_of_run(self._run, self._is_explicit),
        }

    def _answer_at_end(self) -> None:
        if self._optimizer is not None and os.getpid() == self._place[0]:
            self._command.answer(result=self._times())

    def _compare(self, run: Run | None) -> NoReturn:
        """Answer with the result of `verify` for the first batch, which is available once the run is undone."""
        self._uninstall()
        if run is not None:
            run.end()
        self._command.end(result=_comparison_in(None if run is None else run.report))


def _of_run(run: Run | None, is_explicit: bool) -> dict[str, Any]:
    """Return the options of a run that JSON supports, the details of its steps, and how its options are written."""
    options = {} if run is None else run.options.as_dict()
    results = [] if run is None or run.report is None else run.report.results
    return {
        "options": {name: value for name, value in options.items() if is_json(value)},
        "report": {result.name: [result.status, result.detail, result.code] for result in results},
        "written": run.written if run is not None and is_explicit else ["nano_loop.install(", ")"],
        "is_explicit": is_explicit,
    }


def _mean_without_pauses(seconds: list[float]) -> float:
    """Return the mean without evaluations and checkpoints between steps. Loader workers yield batches in bursts."""
    most = 20 * sorted(seconds)[len(seconds) // 2]
    kept = [step for step in seconds if step <= most]
    return sum(kept) / len(kept)


def _comparison_in(report: SetupReport | None) -> dict[str, Any]:
    """Return the result of `verify`: the fault, if any, and the largest errors, or why nothing was compared."""
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


def _largest(errors: Iterable[float]) -> float | None:
    """Return the largest error; None if there are no errors or one is not finite, which JSON does not support."""
    known = [*errors]
    return max(known) if known and all(map(math.isfinite, known)) else None
