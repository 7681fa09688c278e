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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private_autograd import current_node_number, next_node_number

_MOST_CALLS = 1 << 16


NONE: Mapping[int, Callable[..., Any]] = {}

#: Computes a call of an operator. Takes torch's or our function, the dispatch key set, and the operator's arguments.
OperatorRule = Callable[..., Any]


class ProductPolicy(Protocol):
    """Decides which products of fp32 tensors round their inputs: `nano_loop.policy.product_precision.Policy`."""

    dtype: torch.dtype
    tried: set[str]

    def may_round(self, kind: str, multiplications: int) -> bool:
        """Return whether a product is large enough to be measured, or to round."""

    def note(self, kind: str, multiplications: int, packed: int) -> None:
        """Note a product that rounds."""


class Chooser(Protocol):
    """Chooses one of the algorithms of a call: `nano_loop.autotune.generation.Generation`."""

    def algorithm(
        self,
        call: Any,
        algorithms: Callable[[], Mapping[str, Callable[..., Any]]],
        guess: str,
    ) -> str:
        """Return the name of the algorithm."""


class Rules(NamedTuple):
    """What holds in the calls into one model, and in their backward.

    Attributes
    ----------
    operators : mapping of str to callable
        How listed operators are computed under autocast, by their names.
    policy : ProductPolicy or None
        Which products of fp32 tensors round. None: none do.
    kernels : frozenset of str
        The C files whose functions may compute fp32 tensors.
    takes_kernels : bool
        Whether these do wherever they can: in reduced precision, where tensors in fp32 are few.
    chooser : Chooser or None
        What has measured the algorithms. None: the first guesses are taken.
    owner : int
        The id of the interceptor whose rules these are.
    """

    operators: Mapping[str, OperatorRule] = {}
    policy: ProductPolicy | None = None
    kernels: frozenset[str] = frozenset()
    takes_kernels: bool = False
    chooser: Chooser | None = None
    owner: int = 0


NO_RULES = Rules()


class _Graphs:
    """The numbers of the first node of each call of a thread, of the first one behind it, and the call's rules."""

    def __init__(self) -> None:
        self.starts, self.ends = array("Q"), array("Q")
        self.rules: list[Rules] = []
        #: The first nodes and the ends of what is computed without the policy in a call that has not ended.
        self.without_policy: list[tuple[int, int]] = []


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
    graphs : _Graphs
        Where the graphs of this thread's calls are.
    at_end : list or None
        What the outermost backward of this thread is to do at its end, while an inner one runs; None outside of that.
    """

    interceptors: dict[int, tuple[Any, ...]] = process_wide("interceptors of calls, by module", {})
    watchers: list[Callable[..., Any]] = process_wide("watchers of calls", [])

    def __init__(self) -> None:
        self.in_call = False  # on the object: `torch.compile` guards on whether it is there
        self.accelerated = False
        self.modules = NONE  # by the id of a module
        self.rules = NO_RULES
        self.watched = False
        self.has_no_policy = False  # whether products are in fp32 now, whatever the rules say
        self.graphs = _Graphs()
        self.at_end: list[Callable[[], None]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a state in which nothing is intercepted, for cloudpickle sends a bound method with its globals."""
        return SimpleNamespace, (), {"in_call": False, "interceptors": {}, "watchers": (), "watched": False}


call_state = CallState()


def belongs_to_set_up_model() -> bool:
    """Return whether torch computes for a set-up model now: in a call into it, or in the backward of one."""
    return call_state.accelerated or _place_of_current_node() is not None


def rules_now() -> Rules | None:
    """Return the rules of the call that torch computes now, or whose backward: None outside of set-up models."""
    if call_state.accelerated:
        rules = call_state.rules
    else:
        place = _place_of_current_node()
        if place is None:
            return None
        rules = call_state.graphs.rules[place]
    return rules._replace(policy=None) if call_state.has_no_policy else rules


@contextmanager
def without_policy() -> Iterator[None]:
    """Compute all products of the body in fp32, and those of the backward of what is computed in it."""
    before, start = call_state.has_no_policy, next_node_number()
    call_state.has_no_policy = True
    try:
        yield
    finally:
        call_state.has_no_policy = before
        if not before:
            call_state.graphs.without_policy.append((start, next_node_number()))


@contextmanager
def by_rules(rules: Rules) -> Iterator[None]:
    """Compute the body as in a call into a set-up model by these rules."""
    before = call_state.accelerated, call_state.rules
    call_state.accelerated, call_state.rules = True, rules
    try:
        yield
    finally:
        call_state.accelerated, call_state.rules = before


def note_graph(start: int, end: int, rules: Rules = NO_RULES) -> None:
    """Note that the nodes from `start` to before `end` were made inside a call into a set-up model, by these rules."""
    if call_state.has_no_policy:
        rules = rules._replace(policy=None)
    parts, call_state.graphs.without_policy = call_state.graphs.without_policy, []
    for first, behind in parts:
        if start <= first and behind <= end:
            _note_nodes(start, first, rules)
            _note_nodes(first, behind, rules._replace(policy=None))
            start = behind
    _note_nodes(start, end, rules)


def _note_nodes(start: int, end: int, rules: Rules) -> None:
    graphs = call_state.graphs
    starts, ends = graphs.starts, graphs.ends
    if start == end:
        return
    if ends and ends[-1] == start and graphs.rules[-1] is rules:
        ends[-1] = end
        return
    starts.append(start)
    ends.append(end)
    graphs.rules.append(rules)
    if len(starts) > _MOST_CALLS:
        for numbers in (starts, ends, graphs.rules):
            del numbers[: _MOST_CALLS // 2]


def _place_of_current_node() -> int | None:
    """Return the place of the call that has made the node whose backward this thread is running, or None."""
    number = current_node_number()
    return None if number is None else _place_of(number)


def _place_of(number: int) -> int | None:
    graphs = call_state.graphs
    place = bisect_right(graphs.starts, number) - 1
    return place if place >= 0 and number < graphs.ends[place] else None


def rules_of_node(number: int) -> Rules | None:
    """Return the rules of the call of this thread that has made the node of this number, or None."""
    place = _place_of(number)
    return None if place is None else call_state.graphs.rules[place]


def forget_graphs() -> None:
    """Forget the graphs of this thread's calls."""
    call_state.graphs = _Graphs()
