"""The kinds of work among which the time of profiled steps is divided, with advice for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

#: The kinds of work, in the order of the table.
PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products and convolutions", "attention", "norms and elementwise"
OPTIMIZER, CASTS, LOADER, PYTHON = "optimizer", "casts and layouts", "loader", "Python and the rest"
AVERAGING = "averaging and waiting for ranks"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER, CASTS, LOADER, AVERAGING, PYTHON)
#: The names of what the recorder puts around the averaging of gradients, and around the steps of optimizers.
AVERAGING_EVENT, OPTIMIZER_EVENT = "nano_loop: averaging", "nano_loop: optimizer"
#: That of a closure that an optimizer calls in its step.
CLOSURE_EVENT = "nano_loop: closure"

# Operators of ATen, without the underscore that some begin with. A softmax outside of torch's attention is nearly
# always that of attention by hand.
_ATTENTION = ("softmax", "softmax_backward_data")
_CASTS = ("copy_", "to_copy", "to", "contiguous", "clone")
_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "einsum")
#: The functions of nano_loop that are no operators, by their names in a trace, without the "Backward" behind some.
FUNCTIONS = {
    "_RecurrentLayer": PRODUCTS,
    **dict.fromkeys(("_Losses", "_Means", "_RmsNorm", "_Rows", "_Bags"), ELEMENTWISE),
}
_IN_PRODUCTS = ("conv", "mkldnn_linear", "rnn", "lstm")
#: The optimizers that have fused kernels in torch.
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class Circumstances(NamedTuple):
    """What advice depends on, as it is in the steps."""

    options: Mapping[str, Any] = MappingProxyType({})  # of the run of nano_loop; empty without one
    has_bf16: bool = True  # whether the CPU has instructions for it
    is_reduced: bool = False  # whether products are computed in bf16 or fp16, also by the user's own autocast
    has_convolutions: bool = False
    optimizer: str = ""  # its class
    is_fused: bool = False  # whether it steps by a fused kernel


def _for_products(now: Circumstances) -> str | None:
    options = [] if now.is_reduced or not now.has_bf16 else ['precision="bf16"']
    if now.has_convolutions and not now.options.get("channels_last"):
        options.append("channels_last=True")
    return f"use {' and '.join(options)}: nano-loop tune says what that gains" if options else None


def _for_attention(now: Circumstances) -> str | None:
    if not now.is_reduced:
        return 'use precision="bf16", in which fast_attention applies' if now.has_bf16 else None
    is_off = not now.options.get("fast_attention", False)
    return "use fast_attention, which is faster in bf16" if is_off else None


def _for_elementwise(now: Circumstances) -> str | None:
    return None if now.options.get("compile") else "try compile=True, which fuses these operators"


def _for_optimizer(now: Circumstances) -> str | None:
    if now.is_fused:
        return "step less often, after several backwards: its kernel is fused already"
    if now.optimizer in FUSED:
        return f'{now.optimizer} has a fused kernel, not in use: leave fused_optimizer at "auto", or pass fused=True'
    return f"use {', '.join(FUSED[:-1])} or {FUSED[-1]}, which have fused kernels, or step less often"


def _for_casts(now: Circumstances) -> str | None:
    images = now.has_convolutions and not now.options.get("channels_last")
    return "see log_casts=True" + (", and channels_last=True for the images" if images else "")


def _for_averaging(now: Circumstances) -> str | None:
    compression = "" if now.options.get("gradient_compression") else 'gradient_compression="bf16", '
    return f"try {compression}larger batches, or fewer processes"


#: A part of the step from which on a kind of work is worth a change, and what to change; None if all of it is on.
_ADVICE: Mapping[str, tuple[float, Callable[[Circumstances], str | None]]] = {
    PRODUCTS: (0.4, _for_products),
    ATTENTION: (0.1, _for_attention),
    ELEMENTWISE: (0.2, _for_elementwise),
    OPTIMIZER: (0.1, _for_optimizer),
    CASTS: (0.1, _for_casts),
    LOADER: (0.1, lambda now: "try num_workers of the DataLoader, or keep decoded samples in memory"),
    AVERAGING: (0.1, _for_averaging),
    PYTHON: (0.15, lambda now: "use larger batches: this time does not grow with them"),
}


class Event(Protocol):
    """An event of `torch.profiler`, as far as it is used here: times are in microseconds."""

    name: str
    thread: int
    cpu_parent: Any
    self_cpu_time_total: float
    cpu_time_total: float


def times_of(events: Iterable[Event], wall: float) -> dict[str, float]:
    """Return the time of each kind of work in some steps, in the unit of the events.

    The events are those of the thread of the loop. What no event covers of `wall`, the time of the steps, is Python's.
    """
    times = dict.fromkeys(KINDS, 0.0)
    for event in events:
        times[kind_of(event)] += event.self_cpu_time_total
    times[PYTHON] += max(wall - sum(times.values()), 0.0)
    return times


def kind_of(event: Event) -> str:
    """Return the kind of work of an event: that of the loader and the optimizer hold all that is inside."""
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
        if name.startswith((OPTIMIZER_EVENT, "Optimizer.step", "Optimizer.zero_grad")):
            return OPTIMIZER
        if name == AVERAGING_EVENT:
            return AVERAGING
    inside = [name.removeprefix("aten::") for name in names if name.startswith("aten::")]
    if any("attention" in name.lower() for name in names):  # torch's operators, and the function of fast_attention
        return ATTENTION
    function = FUNCTIONS.get(event.name.removesuffix("Backward"))
    if function is not None:
        return function
    return kind_of_operator(inside[0]) if inside and event.name.startswith("aten::") else PYTHON


def kind_of_operator(name: str) -> str:
    """Return the kind of work of an operator, whose name is given without ``aten::``, by itself."""
    name = name.removeprefix("_")
    if name in _ATTENTION:
        return ATTENTION
    if name in _CASTS:
        return CASTS
    return PRODUCTS if name in _PRODUCTS or any(part in name for part in _IN_PRODUCTS) else ELEMENTWISE


def advice_for(times: Mapping[str, float], now: Circumstances) -> list[str]:
    """Return what could be changed, for the three largest kinds of work that are worth it."""
    whole = sum(times.values()) or 1.0
    largest = sorted(times, key=lambda kind: -times[kind])
    worthwhile = [kind for kind in largest if times[kind] / whole >= _ADVICE[kind][0]]
    changes = [(kind, change) for kind in worthwhile if (change := _ADVICE[kind][1](now))]
    return [f"{kind}, {times[kind] / whole:.0%}: {change}" for kind, change in changes[:3]]


def lines_of(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a profile as text."""
    rows: Sequence[Mapping[str, Any]] = profile["kinds"]
    width = max(len(row["kind"]) for row in rows)
    yield f"  {'kind of work':<{width}}  {'ms a step':>9}  share"
    for row in rows:
        note = f"  {row['share_of_rate']:.0%} of the machine's rate" if row.get("share_of_rate") else ""
        note += f"  {row['share_of_memory_rate']:.0%} of its memory's rate" if row.get("share_of_memory_rate") else ""
        yield f"  {row['kind']:<{width}}  {row['milliseconds']:9.3f}  {row['share']:5.0%}{note}"
    yield f"  {'a step, profiled':<{width}}  {profile['profiled_ms']:9.3f}"
    yield f"  {'a step, not profiled':<{width}}  {profile['step_ms']:9.3f}"
    for number, text in enumerate(profile["advice"], 1):
        yield f"{number}. {text}"
