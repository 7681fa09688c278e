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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private_autograd import current_node_number, next_node_number

_MOST_CALLS = 1 << 16


NONE: Mapping[int, Callable[..., Any]] = {}

#: Computes a call of an operator. Takes torch's or our function, the dispatch key set, and the operator's arguments.
Rule = Callable[..., Any]
NO_RULES: Mapping[str, Rule] = {}


class CallState(threading.local):
    """What surrounds the modules' calls and operators of the call that this thread is in.

    Attributes
    ----------
    in_call : bool
        Whether the thread is inside a call that is intercepted.
    accelerated : bool
        Whether that call is into a set-up model, and not into one that is to compute as the plain loop does.
    interceptors : dict
        Of all threads, the interceptors of a module, by its id. There are several if runs of several threads, or nested
        runs, have set it up.
    watchers : list
        Of all threads, what calls into modules that have no interceptors go through: called with the function, the
        module and the arguments.
    watched : bool
        Whether the thread is inside a call that has gone through a watcher.
    """

    interceptors: dict[int, tuple[Any, ...]] = process_wide("interceptors of calls, by module", {})
    watchers: list[Callable[..., Any]] = process_wide("watchers of calls", [])

    def __init__(self) -> None:
        self.in_call = False  # on the object: `torch.compile` guards on whether it is there
        self.accelerated = False
        self.modules = NONE  # by the id of a module
        self.rules = NO_RULES  # by the name of an operator
        self.watched = False
        self.suspended: frozenset[str] = frozenset()  # the operators whose rules do not count now

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a state in which nothing is intercepted, for cloudpickle sends a bound method with its globals."""
        return SimpleNamespace, (), {"in_call": False, "interceptors": {}, "watchers": (), "watched": False}


class _Graphs(threading.local):
    """The numbers of the first node of each call of this thread, of the first one behind it, and the call's rules."""

    def __init__(self) -> None:
        self.starts, self.ends = array("Q"), array("Q")
        self.rules: list[Mapping[str, Rule]] = []
        self.have_rules = False
        #: The first nodes, the ends and the operators of suspensions within a call that has not ended.
        self.suspended: list[tuple[int, int, str]] = []


call_state = CallState()
_graphs = _Graphs()


def belongs_to_set_up_model() -> bool:
    """Return whether torch computes for a set-up model now: in a call into it, or in the backward of one."""
    return call_state.accelerated or _place_of_current_node() is not None


def rule_for(operator: str) -> Rule | None:
    """Return the rule for an operator in the call, or in the backward of the call, that torch computes now, or None."""
    if operator in call_state.suspended:
        return None
    if call_state.accelerated:
        return call_state.rules.get(operator)
    if not _graphs.have_rules:
        return None
    place = _place_of_current_node()
    return None if place is None else _graphs.rules[place].get(operator)


@contextmanager
def without_rule(operator: str) -> Iterator[None]:
    """Compute the body without the rule for an operator, and the backward of what is computed in it."""
    before, start = call_state.suspended, next_node_number()
    call_state.suspended = before | {operator}
    try:
        yield
    finally:
        call_state.suspended = before
        if operator not in before:
            _graphs.suspended.append((start, next_node_number(), operator))


def note_graph(start: int, end: int, rules: Mapping[str, Rule] = NO_RULES) -> None:
    """Note that the nodes from `start` to before `end` were made inside a call into a set-up model, by these rules."""
    if call_state.suspended:
        rules = _without(rules, call_state.suspended)
    suspended, _graphs.suspended = _graphs.suspended, []
    for first, behind, operator in suspended:
        if start <= first and behind <= end:
            _note_nodes(start, first, rules)
            _note_nodes(first, behind, _without(rules, {operator}))
            start = behind
    _note_nodes(start, end, rules)


def _without(rules: Mapping[str, Rule], operators: Collection[str]) -> Mapping[str, Rule]:
    return {operator: rule for operator, rule in rules.items() if operator not in operators}


def _note_nodes(start: int, end: int, rules: Mapping[str, Rule]) -> None:
    starts, ends = _graphs.starts, _graphs.ends
    if start == end:
        return
    if ends and ends[-1] == start and _graphs.rules[-1] is rules:
        ends[-1] = end
        return
    starts.append(start)
    ends.append(end)
    _graphs.rules.append(rules)
    _graphs.have_rules |= bool(rules)
    if len(starts) > _MOST_CALLS:
        for numbers in (starts, ends, _graphs.rules):
            del numbers[: _MOST_CALLS // 2]


def _place_of_current_node() -> int | None:
    """Return the place of the call that has made the node whose backward this thread is running, or None."""
    number = current_node_number()
    return None if number is None else _place_of(number)


def _place_of(number: int) -> int | None:
    place = bisect_right(_graphs.starts, number) - 1
    return place if place >= 0 and number < _graphs.ends[place] else None


def rule_of_node(operator: str, number: int) -> Rule | None:
    """Return the rule for an operator in the call of this thread that has made the node of this number, or None."""
    place = _place_of(number)
    return None if place is None else _graphs.rules[place].get(operator)


def forget_graphs() -> None:
    """Forget the graphs of this thread's calls."""
    _graphs.__init__()  # type: ignore[misc]
