"""The recorder of `nano-loop profile`: it times and profiles steps of a loop in turn, and then ends the process."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from nano_loop.config.protocol import Command, take_command
from nano_loop.cpu import Machine, read_machine
from nano_loop.cpu.native_output import without_lines
from nano_loop.patching.objects.optimizers import closure_of, hook_after_steps, hook_before_steps, with_closure
from nano_loop.profiling import PROFILED, STEPS, TIMED, UNCOUNTED, WARMUP
from nano_loop.profiling.kinds import (
    CLOSURE_EVENT,
    ELEMENTWISE,
    KINDS,
    OPTIMIZER_EVENT,
    PRODUCTS,
    Circumstances,
    advice_for,
    kind_of,
    times_of,
)
from nano_loop.profiling.machine_rates import memory_rate, product_rate
from nano_loop.profiling.rates import moves_in, products_in, rate_of
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.run import active_run

_MARK = b"USDT:"  # of the lines that torch 2.13 writes when a profile begins and ends
#: By the names that the profiler gives dtypes, and those of precisions.
_REDUCED, _FULL = ("c10::BFloat16", "c10::Half"), ("32-true", "64-true")


def record_requested() -> None:
    """Profile the steps of the first optimizer that steps in this thread, if a command asks for it.

    Then the process ends.
    """
    command = take_command()
    if command is not None and command.name == "profile":
        _Recorder(command, read_machine())


class _Profiled(NamedTuple):
    """A step under the profiler: its seconds, and the events of the thread of the loop."""

    seconds: float
    events: list[Any]


class _Recorder:
    def __init__(self, command: Command, machine: Machine) -> None:
        self._command = command
        self._machine = machine
        self._place = os.getpid(), threading.get_ident()
        self._optimizer: Optimizer | None = None
        self._taken = 0
        self._began = 0.0
        self._profile: Any = None
        self._plain: list[float] = []
        self._profiled: list[_Profiled] = []
        self._open: list[Any] = []  # a mark for each optimizer that steps
        hook_before_steps(self._mark)
        hook_after_steps(self._note)

    def _is_here(self) -> bool:
        return (os.getpid(), threading.get_ident()) == self._place

    def _mark(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the profiler see a step of an optimizer: torch's own event ends after the hooks, when we have stopped.

        A closure of the step is forward and backward.
        """
        if not self._is_here():
            return None
        self._open.append(_marked(OPTIMIZER_EVENT))
        closure = closure_of(args, kwargs)
        if closure is None:
            return None

        def marked() -> Any:
            with record_function(CLOSURE_EVENT):
                return closure()

        return with_closure(args, kwargs, marked)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_here():
            return
        if self._open:
            self._open.pop().__exit__(None, None, None)
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        seconds = time.perf_counter() - self._began
        self._taken += 1
        if self._taken > WARMUP:
            self._take(seconds)
        if self._taken == STEPS:
            self._end()
        self._began = time.perf_counter()

    def _take(self, seconds: float) -> None:
        """Take a step that has ended, and begin the profile of the next, if this one was not profiled.

        torch's own event of the optimizer's step is still open here. When it ends, torch writes to the profile that it
        began in if there is any, which has been freed. So no profile begins where another one ends.
        """
        if self._profile is not None:
            with without_lines(2, _MARK):
                self._profile.stop()
            self._profiled.append(_Profiled(seconds, _events_of_loop(self._profile)))
            if self._taken == STEPS - 2 and (trace := self._command.arguments.get("trace")):
                self._write(trace)
            self._profile = None
            return
        self._plain.append(seconds)
        if self._taken >= WARMUP + TIMED:
            shapes = self._taken == STEPS - 1
            self._profile = profile(activities=[ProfilerActivity.CPU], with_flops=shapes, record_shapes=shapes)
            with without_lines(2, _MARK):
                self._profile.start()

    def _write(self, trace: str) -> None:
        try:
            self._profile.export_chrome_trace(trace)
        except (OSError, RuntimeError) as error:
            self._command.answer(error=str(error))
            _exit()

    def _end(self) -> NoReturn:
        self._command.answer(result=self._content())
        _exit()

    def _content(self) -> dict[str, Any]:
        *profiled, shaped = self._profiled[UNCOUNTED:]
        wall = sum(step.seconds for step in profiled)
        steps = [step.events for step in profiled]
        times = times_of((event for events in steps for event in events), wall * 1e6)
        whole = sum(times.values())
        rows: list[dict[str, Any]] = [
            {"kind": kind, "milliseconds": times[kind] / PROFILED / 1e3, "share": times[kind] / whole} for kind in KINDS
        ]
        dtype = torch.bfloat16 if self._machine.has_fast_bf16 else None
        if (rate := rate_of(products_in(shaped.events), PRODUCTS, steps)) is not None:
            rows[KINDS.index(PRODUCTS)]["share_of_rate"] = min(rate / product_rate(dtype), 1.0)
        if (moved := rate_of(moves_in(shaped.events), ELEMENTWISE, steps)) is not None:
            rows[KINDS.index(ELEMENTWISE)]["share_of_memory_rate"] = min(moved / memory_rate(), 1.0)
        return {
            "kinds": rows,
            "step_ms": statistics.median(self._plain[:TIMED]) * 1e3,
            "profiled_ms": wall / PROFILED * 1e3,
            "advice": advice_for(times, self._circumstances(shaped.events)),
        }

    def _circumstances(self, events: list[Any]) -> Circumstances:
        """Return what the advice depends on: the active run, and the operators in `events`."""
        run, optimizer = active_run(), self._optimizer
        options, kernels = ({}, []) if run is None else (run.options.as_dict(), _optimizers_with_kernels(run.report))
        name = type(optimizer).__name__
        products = [event for event in events if kind_of(event) == PRODUCTS]
        dtypes = {dtype for event in products for dtype in getattr(event, "input_dtypes", None) or ()}
        return Circumstances(
            options=options,
            has_bf16=self._machine.has_fast_bf16,
            is_reduced=not dtypes.isdisjoint(_REDUCED) or options.get("precision", _FULL[0]) not in _FULL,
            has_convolutions=any("conv" in event.name for event in products),
            optimizer=name,
            is_fused=name in kernels or any(group.get("fused") for group in getattr(optimizer, "param_groups", ())),
        )


def _optimizers_with_kernels(report: SetupReport | None) -> list[str]:
    """Return the names of the optimizers that the report says to step by fused kernels."""
    results = [] if report is None else report.results
    details = [result.detail for result in results if (result.name, result.status) == ("fused_optimizer", "applied")]
    return [name for detail in details for name in detail.partition(";")[0].split(", ")]


def _marked(event: str) -> Any:
    mark: Any = record_function(event)
    mark.__enter__()
    return mark


def _events_of_loop(profiled: Any) -> list[Any]:
    """Return the events of the thread that has most of them."""
    events = profiled.events()
    threads = Counter(event.thread for event in events).most_common(1)
    return [event for event in events if event.thread == threads[0][0]]


def _exit() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced it
            stream.flush()
    os._exit(0)  # what follows in the script belongs to a training
