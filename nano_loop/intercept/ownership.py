"""Determines whether the current operator belongs to a set-up model.

In a forward, it does if the thread is inside a call into such a model. In a backward, it does if the graph was created
inside such a call. torch numbers the autograd nodes of a thread in order of creation, so the nodes of a call are a
range of numbers, and the number of the current node shows whether it is in the range of a call.

A graph counts as not belonging to a set-up model if its backward runs in another thread than its forward, or if more
than 65,536 calls were made since. This is safe, since torch's own kernels are always correct.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right

from nano_loop.intercept.torch_private import current_node_number

_MOST_CALLS = 1 << 16


class Inside(threading.local):
    """Whether this thread is inside a call into a set-up model."""

    def __init__(self) -> None:
        self.yes = False  # an instance attribute, since `torch.compile` guards on its existence


class _Graphs(threading.local):
    """The ranges of node numbers of this thread's calls: the first number, and the first one after the call."""

    def __init__(self) -> None:
        self.starts, self.ends = array("Q"), array("Q")


inside = Inside()
_graphs = _Graphs()


def belongs_to_set_up_model() -> bool:
    """Return whether the current operator is in a call into a set-up model, or in the backward of such a call."""
    if inside.yes:
        return True
    number = current_node_number()
    if number is None:
        return False
    place = bisect_right(_graphs.starts, number) - 1
    return place >= 0 and number < _graphs.ends[place]


def note_graph(start: int, end: int) -> None:
    """Note that the nodes from `start` to `end`, exclusive, were created inside a call into a set-up model."""
    starts, ends = _graphs.starts, _graphs.ends
    if start == end:
        return
    if ends and ends[-1] == start:
        ends[-1] = end
        return
    starts.append(start)
    ends.append(end)
    if len(starts) > _MOST_CALLS:
        del starts[: _MOST_CALLS // 2], ends[: _MOST_CALLS // 2]


def forget_graphs() -> None:
    """Discard the noted graphs of this thread."""
    _graphs.__init__()  # type: ignore[misc]
