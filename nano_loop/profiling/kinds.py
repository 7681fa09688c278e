"""The kinds of work into which the time of profiled steps is divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nano_loop.config.protocol import AVERAGING_EVENT
from nano_loop.runtime.objects.report import size

#: The kinds of work, in the order of the table.
PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products and convolutions", "attention", "norms and elementwise"
OPTIMIZER, CASTS, LOADER, PYTHON = "optimizer", "casts and layouts", "loader", "Python and the rest"
AVERAGING = "averaging and waiting for ranks"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER, CASTS, LOADER, AVERAGING, PYTHON)
#: The names of the recorder's events around optimizer steps, as in torch, and around their closures.
OPTIMIZER_EVENT, CLOSURE_EVENT = "Optimizer.step", "nano_loop: closure"

#: The name of memory that is allocated outside layers.
OUTSIDE = "loss, batch and backward"
_LAYERS = 10  # maximum number of layers in the table of memory

# ATen operators, without the leading underscore of some. A softmax outside torch's attention is nearly always part of
# a hand-written attention.
_ATTENTION = ("softmax", "softmax_backward_data")
_CASTS = ("copy_", "to_copy", "to", "contiguous", "clone")
_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "einsum")
#: The functions of nano_loop that are not operators, by their names in a trace, without the suffix "Backward".
FUNCTIONS = {
    **dict.fromkeys(("_RecurrentLayer", "_Chunked", "_Placed", "_Materialized"), PRODUCTS),
    **dict.fromkeys(("_Losses", "_Means", "_RmsNorm", "_Rows", "_Bags"), ELEMENTWISE),
}
_IN_PRODUCTS = ("conv", "mkldnn_linear", "rnn", "lstm")


def times_of(events: Iterable[Any], wall: float) -> dict[str, float]:
    """Return the time of each kind of work in `torch.profiler`'s events of the loop; the rest of `wall` is Python's."""
    times = dict.fromkeys(KINDS, 0.0)
    for event in events:
        times[kind_of(event)] += event.self_cpu_time_total
    times[PYTHON] += max(wall - sum(times.values()), 0.0)
    return times


def kind_of(event: Any) -> str:
    """Return the kind of work of an event. Everything inside the loader or the optimizer has their kind."""
    names = [event.name]
    parent = event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    for name in names:
        if name == CLOSURE_EVENT:
            break
        if name.startswith("enumerate(DataLoader)"):
            return LOADER
        if name.startswith((OPTIMIZER_EVENT, "Optimizer.zero_grad")):
            return OPTIMIZER
        if name == AVERAGING_EVENT:
            return AVERAGING
    inside = [name.removeprefix("aten::") for name in names if name.startswith("aten::")]
    if any("attention" in name.lower() for name in names):  # torch's operators and the function of fast_attention
        return ATTENTION
    function = FUNCTIONS.get(event.name.removesuffix("Backward"))
    if function is not None:
        return function
    return kind_of_operator(inside[0]) if inside and event.name.startswith("aten::") else PYTHON


def kind_of_operator(name: str) -> str:
    """Return the kind of work of a single operator, whose name is given without ``aten::``."""
    name = name.removeprefix("_")
    if name in _ATTENTION:
        return ATTENTION
    if name in _CASTS:
        return CASTS
    return PRODUCTS if name in _PRODUCTS or any(part in name for part in _IN_PRODUCTS) else ELEMENTWISE


def lines_of(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a profile as text."""
    rows: Sequence[Mapping[str, Any]] = profile["kinds"]
    width = max(len(row["kind"]) for row in rows)
    yield f"  {'kind of work':<{width}}  {'ms per step':>9}  share"
    for row in rows:
        yield f"  {row['kind']:<{width}}  {row['milliseconds']:9.3f}  {row['share']:5.0%}"
    yield f"  {'per step, profiled':<{width}}  {profile['profiled_ms']:9.3f}"
    yield f"  {'per step, not profiled':<{width}}  {profile['step_ms']:9.3f}"


def lines_of_memory(memory: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of the results of `profiling.recorder` as text."""
    names = {"states": "optimizer states", "other": OUTSIDE}
    yield f"  {'memory at the peak of a step':<33}  {'size':>9}"
    for kind in ("parameters", "gradients", "states", "other", "activations"):
        yield f"  {names.get(kind, kind):<33}  {size(memory[kind]):>9}"
    for layer in memory["layers"][:_LAYERS]:
        yield f"    {layer['layer']:<31}  {size(layer['bytes']):>9}"
