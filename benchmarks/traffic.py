"""Measure time and bytes of the operators between a step's products, under nano_loop in bf16, in one process.

Times are from profiled steps, tensors from one more step, which torch's execution trace records. Operators are matched
by their names and the part of the loop in which they run.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import nano_loop
from benchmarks.execution_trace import Operator, Recorder
from benchmarks.loop import endless
from benchmarks.workloads import Workload
from nano_loop.profiling.kinds import PRODUCTS, kind_of_operator

WARMUP, TIMED, UNCOUNTED, PROFILED = 4, 3, 1, 6
#: Operators that compute and move nothing, without the underscore with which some begin.
_NOTHING = frozenset(
    (
        *("alias", "as_strided", "broadcast_to", "chunk", "detach", "detach_", "diagonal", "expand", "expand_as"),
        *("flatten", "movedim", "narrow", "numpy_T", "permute", "reshape", "resize_", "select", "slice", "split"),
        *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "reshape_alias"),
        *("unsafe_view", "empty_like", "result_type", "set_", "unsafe_split", "split_with_sizes"),
        *("empty", "empty_strided", "new_empty", "resize_as_", "is_nonzero", "item", "local_scalar_dense"),
    )
)
_WRITE_ONLY = ("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_")
#: Operators that read as many elements of their first input as they return.
_GATHERING = ("embedding", "index", "index_select", "gather")
#: Bytes that fused optimizers move per byte of parameters, gradients and state that they read: gradients are not
#: written.
_FUSED = {"_fused_adam_": 7 / 4, "_fused_adamw_": 7 / 4, "_fused_sgd_": 5 / 3, "_fused_adagrad_": 5 / 3}
#: An operator whose own share of its time is less than this only calls others.
_OWN_SHARE = 0.5
_COPIED = 256 << 20  # bytes of the copies that measure the memory bandwidth


class Place(NamedTuple):
    """An operator, and the part of the loop in which it runs: ``forward``, ``backward`` or ``optimizer``."""

    part: str
    operator: str


def traffic(work: Workload) -> dict[str, Any]:
    """Train a workload, and return time and bytes per step of each operator between its products.

    Returns
    -------
    dict
        ``step_ms``, the fastest of some steps without profiler; ``memory_rate`` in bytes per second; and ``rows``:
        ``part``, ``operator``, ``calls``, ``ms`` and ``bytes``, each in a step. Of each call the fastest counts.
    """
    rate = memory_rate()
    seconds, steps, traced = _trained(work)
    mine = computing(event for events in steps for event in events)
    times = _fastest([_times(events, mine) for events in steps])
    moved = bytes_by_place(traced, mine)
    rows = [
        {**place._asdict(), "calls": len(spent), "ms": sum(spent) / 1e3, "bytes": moved[place]}
        for place, spent in times.items()
        if moved.get(place)
    ]
    return {"step_ms": min(seconds) * 1e3, "memory_rate": max(rate, memory_rate()), "rows": rows}


def memory_rate() -> float:
    """Return the bytes per second that this machine reads and writes, for copies larger than the caches."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target, best = torch.ones_like(source), 0.0
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * _COPIED / (time.perf_counter() - began))
    return best


def _trained(work: Workload) -> tuple[list[float], list[list[Any]], list[Operator]]:
    """Return the seconds of plain steps, the events of profiled ones, and the operators of a traced one."""
    options: dict[str, Any] = {"precision": "bf16", "channels_last": work.images, "verbose": False}
    run: Callable[..., Any] = nano_loop.nano(**options)(_steps)
    found: tuple[list[float], list[list[Any]], list[Operator]] = run(
        work.model, work.optimizer, work.batches, work.loss
    )
    return found


def _steps(model: Any, optimizer: Any, batches: Iterable[Any], loss: Callable[..., Any]) -> Any:
    feed = iter(endless(batches))

    def step() -> float:
        batch = next(feed)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        return time.perf_counter() - began

    seconds = [step() for _ in range(WARMUP + TIMED)][WARMUP:]
    profiled = []
    for _ in range(UNCOUNTED + PROFILED):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        profiled.append([event for event in profiler.events() if not _is_loading(event)])
    recorder = Recorder({})
    step()
    return seconds, profiled[UNCOUNTED:], recorder.finish()


def computing(events: Iterable[FunctionEvent]) -> frozenset[str]:
    """Return the ATen operators that compute something themselves, without views and operators that only call others.

    The median call decides, for another program may interrupt any of them.
    """
    own, called = defaultdict[int, float](float), []
    for event in events:
        if (
            event.name.removeprefix("aten::").removeprefix("_") in _NOTHING
        ):  # allocates memory for the result of the enclosing operator
            if event.cpu_parent is not None:
                own[id(event.cpu_parent)] += event.cpu_time_total
        elif event.name.startswith("aten::"):
            own[id(event)] += event.self_cpu_time_total
            called.append(event)
    shares = defaultdict[str, list[float]](list)
    for event in called:
        shares[event.name].append(own[id(event)] / event.cpu_time_total if event.cpu_time_total else 1.0)
    return frozenset(name for name, found in shares.items() if statistics.median(found) >= _OWN_SHARE)


def _times(events: Sequence[FunctionEvent], mine: Collection[str]) -> dict[Place, list[float]]:
    """Return the microseconds of each call of the operators that are not products and not inside others."""
    found = defaultdict[Place, list[float]](list)
    for event in events:
        around = [each.name for each in _around(event)]
        if event.name in mine and mine.isdisjoint(around) and not is_product(event.name):
            found[Place(_part(around), event.name.removeprefix("aten::"))].append(event.cpu_time_total)
    return found


def _fastest(steps: Sequence[Mapping[Place, Sequence[float]]]) -> dict[Place, list[float]]:
    """Return the fastest time of each call over some steps, since other programs may have disturbed some."""
    found = {}
    for place in steps[0]:
        calls = [each.get(place, ()) for each in steps]
        count = statistics.mode(len(each) for each in calls)  # a step may compute more, as to tune an operator
        found[place] = [min(times) for times in zip(*(each for each in calls if len(each) == count), strict=True)]
    return found


def bytes_by_place(operators: Iterable[Operator], mine: Collection[str]) -> Mapping[Place, float]:
    """Return the minimum bytes that operators move: those of `mine` that are not inside others of `mine`."""
    found = defaultdict[Place, float](float)
    for each in operators:
        name = f"aten::{each.name}"
        if name not in mine:
            for place, moved in bytes_by_place(each.inner, mine).items():
                found[place] += moved
        elif not is_product(name):
            found[Place(each.part, each.name)] += moves(each)
    return found


def moves(operator: Operator) -> float:
    """Return the minimum bytes that one call of an operator reads and writes."""
    name = operator.name
    inputs = {each.key: each for each in operator.inputs}
    outputs = {each.key: each for each in operator.outputs}
    if name in _FUSED:
        return _FUSED[name] * sum(each.nbytes for each in inputs.values())
    written = sum(each.nbytes for each in outputs.values())
    if name in _GATHERING:
        first, *others = inputs.values()
        return min(first.nbytes, written) + sum(each.nbytes for each in others) + written
    # For all other operators, a result that is also an input is `out=`, which is not read.
    in_place = name.endswith("_") and name not in _WRITE_ONLY
    read = [each for key, each in inputs.items() if in_place or key not in outputs]
    return sum(each.nbytes for each in read) + written


def is_product(name: str) -> bool:
    """Whether an operator is a product, a convolution, a recurrence, or attention, which consists of products."""
    return kind_of_operator(name.removeprefix("aten::")) == PRODUCTS or "attention" in name


def _around(event: FunctionEvent) -> Iterator[FunctionEvent]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent


def _is_loading(event: FunctionEvent) -> bool:
    return any(each.name.startswith("enumerate(DataLoader)") for each in (event, *_around(event)))


def _part(around: Sequence[str]) -> str:
    if any(name.startswith("Optimizer.") for name in around):
        return "optimizer"
    return "backward" if any(name.startswith("autograd::engine::") for name in around) else "forward"
