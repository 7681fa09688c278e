"""Times some steps of a loop, profiles some more, leaves the result to the command, and ends the process."""

from __future__ import annotations

import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from nano_loop.command_note import Command
from nano_loop.cpu import Machine
from nano_loop.distributed.averaging.averaging import Averaging
from nano_loop.intercept.attributes import replaced
from nano_loop.profiling.kinds import (
    AVERAGING_EVENT,
    ELEMENTWISE,
    KINDS,
    PRODUCTS,
    advice_for,
    memory_rate,
    product_rate,
    times_of,
)

#: Steps that are not timed, that are timed without the profiler, and that are profiled.
WARMUP, TIMED, PROFILED = 4, 5, 5
_COPIED = 256 << 20  # bytes by whose copy the rate of the machine's memory is measured
_SIDE = 1024  # of the square products by which the machine's rate is measured


def record(command: Command, machine: Machine) -> None:
    """Profile the steps of the first optimizer that steps in this thread from now on, and then end the process."""
    _Recorder(command, machine)


class _Recorder:
    def __init__(self, command: Command, machine: Machine) -> None:
        self._command = command
        self._machine = machine
        self._place = os.getpid(), threading.get_ident()
        self._optimizer: Optimizer | None = None
        self._ends: list[float] = []
        self._profile: Any = None
        register_optimizer_step_post_hook(self._note)
        replaced(Averaging, "average", _named).__enter__()  # until the process ends

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer or (os.getpid(), threading.get_ident()) != self._place:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) == WARMUP + TIMED:
            self._profile = profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True)
            self._profile.start()
            self._ends[-1] = time.perf_counter()
        elif len(self._ends) == WARMUP + TIMED + PROFILED:
            self._end()

    def _end(self) -> NoReturn:
        self._profile.stop()
        try:
            self._command.answer(profile=self._found())
        except (OSError, RuntimeError) as error:  # the file of the trace cannot be written
            self._command.answer(error=str(error))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have closed or replaced it
                stream.flush()
        os._exit(0)  # what follows in the script belongs to a training

    def _found(self) -> dict[str, Any]:
        steps = [later - sooner for sooner, later in pairwise(self._ends)]
        plain = statistics.median(steps[WARMUP - 1 : WARMUP + TIMED - 2])
        wall = (self._ends[-1] - self._ends[WARMUP + TIMED - 1]) / PROFILED
        events = self._profile.events()
        main = max({each.thread for each in events}, key=lambda one: sum(each.thread == one for each in events))
        own = [each for each in events if each.thread == main]
        times = times_of(own, wall * PROFILED * 1e6)
        rate, dtype = product_rate(own), torch.bfloat16 if self._machine.has_fast_bf16 else None
        whole = sum(times.values())
        rows: list[dict[str, Any]] = [
            {"kind": kind, "milliseconds": times[kind] / PROFILED / 1e3, "share": times[kind] / whole} for kind in KINDS
        ]
        if rate is not None:
            rows[KINDS.index(PRODUCTS)]["share_of_rate"] = min(rate / _machine_rate(dtype), 1.0)
        moved = memory_rate(own)
        if moved is not None:
            rows[KINDS.index(ELEMENTWISE)]["share_of_memory_rate"] = min(moved / _memory_rate(), 1.0)
        if trace := self._command.arguments.get("trace"):
            self._profile.export_chrome_trace(trace)
        advice = advice_for(times)
        return {"kinds": rows, "step_ms": plain * 1e3, "profiled_ms": wall * 1e3, "advice": advice}


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let the profiler see a method as averaging."""

    @functools.wraps(method)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(AVERAGING_EVENT):
            return method(*args, **kwargs)

    return named


def _memory_rate() -> float:
    """Return the bytes per second that this machine reads and writes, by copies that no cache holds."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target, best = torch.ones_like(source), 0.0
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * _COPIED / (time.perf_counter() - began))
    return best


def _machine_rate(dtype: torch.dtype | None) -> float:
    """Return the FLOPs per second of large products, in the faster of fp32 and another dtype."""
    best = 0.0
    for each in (torch.float32, *([] if dtype is None else [dtype])):
        with torch.no_grad(), _plain():
            a = torch.ones(_SIDE, _SIDE, dtype=each)
            for _ in range(4):
                began = time.perf_counter()
                a @ a
                best = max(best, 2 * _SIDE**3 / (time.perf_counter() - began))
    return best


@contextmanager
def _plain() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        yield
