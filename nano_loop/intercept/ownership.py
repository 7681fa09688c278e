"""Says whether what torch computes at this moment belongs to a model that was set up.

In a forward it does while the thread is inside a call into such a model. In a backward it does where the graph was
made inside such a call. torch numbers the autograd nodes of a thread in the order in which they are made, so the nodes
of one call are those between two numbers, and the number of the running node shows whether it is one of them.

A graph whose backward runs in another thread than its forward is taken for one that does not belong, and so is the
graph of a call that lies more than 65,536 calls back: torch's own kernels are always right.
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
        self.yes = False  # on the object: `torch.compile` guards on whether it is there


class _Graphs(threading.local):
    """The numbers of the first node of each call of this thread, and of the first one behind it."""

    def __init__(self) -> None:
        self.starts, self.ends = array("Q"), array("Q")


inside = Inside()
_graphs = _Graphs()


def belongs_to_set_up_model() -> bool:
    """Return whether torch computes for a set-up model now: in a call into it, or in the backward of one."""
    if inside.yes:
        return True
    number = current_node_number()
    if number is None:
        return False
    place = bisect_right(_graphs.starts, number) - 1
    return place >= 0 and number < _graphs.ends[place]


def note_graph(start: int, end: int) -> None:
    """Note that the nodes from `start` to before `end` were made inside a call into a set-up model."""
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
    """Forget the graphs of this thread's calls."""
    _graphs.__init__()  # type: ignore[misc]
