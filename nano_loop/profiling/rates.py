"""The rates of the operators of a step: what they compute and move, and how long that takes.

What operators compute and move follows from the shapes of their inputs. To record those makes a step slower, so one
step is recorded with shapes, and the times come of others: operators are matched by their names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from nano_loop.profiling.kinds import ELEMENTWISE, PRODUCTS, Event, kind_of

# By the names that the profiler gives dtypes.
_SIZES = {
    **dict.fromkeys(("double", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char"), 1),
}
#: Operators that move nothing, without the underscore that some begin with.
VIEWS = frozenset(
    (
        *("alias", "as_strided", "broadcast_to", "chunk", "detach", "detach_", "diagonal", "expand", "expand_as"),
        *("flatten", "movedim", "narrow", "numpy_T", "permute", "reshape", "resize_", "select", "slice", "split"),
        *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "reshape_alias"),
        *("unsafe_view", "empty_like", "result_type", "set_", "unsafe_split", "split_with_sizes"),
    )
)


class ShapedEvent(Event, Protocol):
    """An event that was recorded with the shapes of its inputs."""

    flops: int
    input_shapes: list[list[int]]


class Work(NamedTuple):
    """What some operators do in a step."""

    amount: float  # FLOPs, or bytes
    names: frozenset[str]  # the names of the operators


def products_in(events: Iterable[ShapedEvent]) -> Work:
    """Return the FLOPs of products whose FLOPs are known."""
    return _work([(event, flops) for event in events if kind_of(event) == PRODUCTS and (flops := flops_of(event))])


def moves_in(events: Iterable[ShapedEvent]) -> Work:
    """Return the bytes that norms and elementwise operators move at the least: inputs read, one of them written.

    There are none with a torch that does not note the dtypes of inputs.
    """
    counted = [(event, sizes) for event in events if kind_of(event) == ELEMENTWISE and (sizes := _bytes_of(event))]
    return _work([(event, sum(sizes) + max(sizes)) for event, sizes in counted])


def rate_of(work: Work, kind: str, steps: Sequence[Sequence[Event]]) -> float | None:
    """Return the FLOPs or bytes per second of the operators of a kind, by the events of some steps, or None."""
    events = (event for step in steps for event in step if event.name in work.names and kind_of(event) == kind)
    seconds = sum(event.cpu_time_total for event in events if not _is_inside(event, work.names)) * 1e-6
    return work.amount * len(steps) / seconds if work.amount and seconds else None


def flops_of(event: ShapedEvent) -> int:
    """Return the FLOPs of an event: torch's count, and those of the gradients of convolutions, which torch omits."""
    shapes = event.input_shapes
    if event.name != "aten::convolution_backward" or len(shapes) < 3 or not all(shapes[:3]):
        return event.flops or 0
    gradient, inputs, weight = shapes[:3]
    # A transposed convolution has its inputs' channels first in the weight.
    places = gradient if weight[0] == gradient[1] else inputs
    return 4 * math.prod(places) * math.prod(weight[1:])  # of the inputs, and of the weights


def _work(counted: Sequence[tuple[Event, float]]) -> Work:
    """Return the work of events, without those inside of others."""
    names = frozenset(event.name for event, _ in counted)
    return Work(sum(amount for event, amount in counted if not _is_inside(event, names)), names)


def _is_inside(event: Event, names: Collection[str]) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in names:
            return True
        parent = parent.cpu_parent
    return False


def _bytes_of(event: ShapedEvent) -> list[int]:
    if event.name.removeprefix("aten::").removeprefix("_") in VIEWS:
        return []
    dtypes = getattr(event, "input_dtypes", None) or []
    pairs = zip(event.input_shapes, dtypes, strict=False)
    return [math.prod(shape) * _SIZES[dtype] for shape, dtype in pairs if shape and dtype in _SIZES]
