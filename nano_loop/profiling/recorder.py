"""The recorder of `nano-loop profile`: times steps of a loop, profiles the next ones, and ends the process.

It also records the tensors at the peak of a step's memory, with the activations by layer.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from nano_loop.config.protocol import Command
from nano_loop.cpu.native_output import without_lines
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.optimizers import called_after_steps, called_before_steps, closure_of, held_by, with_closure
from nano_loop.profiling import PROFILED, STEPS, TIMED, UNCOUNTED, WARMUP
from nano_loop.profiling.kinds import CLOSURE_EVENT, KINDS, OPTIMIZER_EVENT, OUTSIDE, times_of
from nano_loop.runtime.run import active_run
from nano_loop.runtime.state_sizes import bytes_of_states

#: The prefix of a layer's name in the trace event around its call.
_LAYER = "nano_loop: layer "


class LayerMarks:
    """Marks the calls of modules for the profiler until `close`."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._open: list[Any] = []
        self._stack = ExitStack()
        self._stack.callback(register_module_forward_pre_hook(self._begin).remove)
        self._stack.callback(register_module_forward_hook(self._end, always_call=True).remove)
        self.close = self._stack.close

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if not self._open:
            modules = nn.Module.named_modules(module)
            self._names = {id(inner): name or type(inner).__name__ for name, inner in modules}
        mark: Any = record_function(f"{_LAYER}{self._names.get(id(module), type(module).__name__)}")
        mark.__enter__()
        self._open.append(mark)

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def memory_of(profiled: Any, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the bytes of each kind, with activations by layer, from a profile with memory and `LayerMarks`."""
    optimizers = [*optimizers]
    held_by_all = [parameter for optimizer in optimizers for parameter in held_by(optimizer)]
    parameters = {id(parameter): parameter for parameter in held_by_all}.values()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(file := str(Path(folder, "trace.json")))
        events = json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]
    held = held_at_peak(events)
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters),
        "states": sum(map(bytes_of_states, optimizers)),
        "activations": sum(held.values()) - held[OUTSIDE],
        "other": held[OUTSIDE],
        "layers": [{"layer": name, "bytes": count} for name, count in held.most_common() if name != OUTSIDE],
    }


def held_at_peak(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the allocated bytes at the peak, by the innermost layer in whose call they were allocated."""
    moments = [event for event in events if event["name"] == "[memory]" or event["name"].startswith(_LAYER)]
    # The start and the end of each call, outermost first, with the allocations and deallocations in between.
    ordered: list[tuple[float, float, Mapping[str, Any]]] = []
    for event in moments:
        ordered.append((event["ts"], -event.get("dur", 0.0), event))
        if "dur" in event:
            ordered.append((event["ts"] + event["dur"], 0.0, {"name": ""}))
    ordered.sort(key=lambda moment: moment[:2])
    blocks: dict[int, tuple[str, int]] = {}
    layers: list[str] = []
    held: Counter[str] = Counter()
    total = most = 0
    peak: Counter[str] = Counter()
    for _, _, event in ordered:
        if event["name"].startswith(_LAYER):
            layers.append(event["name"].removeprefix(_LAYER))
        elif not event["name"]:
            layers.pop()
        elif event["args"]["Bytes"] > 0:
            layer, count = blocks[event["args"]["Addr"]] = (layers or [OUTSIDE])[-1], event["args"]["Bytes"]
            held[layer] += count
            total += count
            if total > most:
                most, peak = total, held.copy()
        elif event["args"]["Addr"] in blocks:  # otherwise it was allocated before the profile
            layer, count = blocks.pop(event["args"]["Addr"])
            held[layer] -= count
            total -= count
    return Counter({layer: count for layer, count in peak.items() if count})


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


_MARK = b"USDT:"  # in the lines that torch 2.13 prints when a profile begins and ends
_FREED = b"Memory block of unknown size"  # printed when memory from before a memory profile is first freed
#: The steps after which profiles begin and end. torch's own event of the optimizer's step is still open at that time.
#: When it ends while a profile is active, torch writes to the profile in which the event began, which has been freed.
#: So a profile must not begin at the step where another one ends.
_BEGINNINGS, _ENDS = (WARMUP + TIMED, STEPS - PROFILED), (WARMUP + TIMED + UNCOUNTED, STEPS)


class Recorder:
    """Profiles the first optimizer that steps in this thread, answers the command, and ends the process."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._place = os.getpid(), threading.get_ident()
        self._optimizer: Optimizer | None = None
        self._began = 0.0
        self._seconds: list[float] = []  # the time of each step
        self._profile: Any = None
        self._marks: LayerMarks | None = None
        self._memory: dict[str, Any] = {}
        self._optimizers: Any = WeakIdKeyDictionary()  # all optimizers that step
        self._open: list[Any] = []  # the open mark of each stepping optimizer
        self._hooks = ExitStack()  # never closed: the process ends
        self._hooks.enter_context(called_before_steps(self._mark))
        self._hooks.enter_context(called_after_steps(self._note))

    def _is_here(self) -> bool:
        return (os.getpid(), threading.get_ident()) == self._place

    def _mark(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark a step for the profiler, as torch's event ends after the hooks; its closure is forward and backward."""
        if not self._is_here():
            return None
        self._optimizers[optimizer] = None
        mark: Any = record_function(OPTIMIZER_EVENT)
        mark.__enter__()
        self._open.append(mark)
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
        self._seconds.append(time.perf_counter() - self._began)
        taken = len(self._seconds)
        with ExitStack() as stack:
            for unwanted in (_MARK, _FREED) if taken in (*_BEGINNINGS, *_ENDS) else ():
                stack.enter_context(without_lines(2, unwanted))
            if taken in _BEGINNINGS:
                is_first = taken == _BEGINNINGS[0]  # its times do not count
                self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=is_first)
                before = torch.empty(1)
                self._profile.start()
                del before  # torch warns about it once in a thousand times; the line is hidden here
                self._marks = LayerMarks() if is_first else None
            elif taken in _ENDS:
                self._profile.stop()
                if self._marks is not None:
                    self._marks.close()
                    self._memory = memory_of(self._profile, self._optimizers)
        if taken == STEPS:
            self._end()
        self._began = time.perf_counter()

    def _end(self) -> NoReturn:
        try:
            if trace := self._command.arguments.get("trace"):
                self._profile.export_chrome_trace(trace)
        except (OSError, RuntimeError) as error:
            self._command.end(error=str(error))
        self._command.end(result=self._content(), is_in_run=active_run() is not None)

    def _content(self) -> dict[str, Any]:
        wall = sum(self._seconds[-PROFILED:])
        times = times_of(_events_of_loop(self._profile), wall * 1e6)
        whole = sum(times.values())
        return {
            "kinds": [
                {"kind": kind, "milliseconds": times[kind] / PROFILED / 1e3, "share": times[kind] / whole}
                for kind in KINDS
            ],
            "step_ms": statistics.median(self._seconds[WARMUP : WARMUP + TIMED]) * 1e3,
            "profiled_ms": wall / PROFILED * 1e3,
            "memory": self._memory,
        }


def _events_of_loop(profiled: Any) -> list[Any]:
    """Return the events of the thread with the most events."""
    events = profiled.events()
    threads = Counter(event.thread for event in events).most_common(1)
    return [event for event in events if event.thread == threads[0][0]]
