"""Tracks whether the operation that torch is computing belongs to a set-up model.

During a forward, it does if the thread is inside a call into such a model. During a backward, it does if the graph was
recorded inside such a call. torch numbers a thread's autograd nodes in order of creation, so the nodes of one call form
a range of sequence numbers, and the number of the running node shows which call it belongs to.

A graph whose backward runs in a different thread than its forward is treated as not belonging, and so is the graph of a
call that is more than 65,536 calls old: using torch's own kernels is always correct.
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

#: Computes an operator call. Accepts torch's or our function, the dispatch key set, and the operator's arguments.
OperatorRule = Callable[..., Any]


class ProductPolicy(Protocol):
    """Decides which fp32 products round their inputs: `nano_loop.policy.product_precision.Policy`."""

    dtype: torch.dtype
    tried: set[str]

    def may_round(self, kind: str, multiplications: int) -> bool:
        """Return whether a product is large enough to be measured or rounded."""

    def note(self, kind: str, multiplications: int, packed: int) -> None:
        """Record a product that rounds its inputs."""


class Chooser(Protocol):
    """Chooses among the algorithms for a call: `nano_loop.autotune.race.Generation`."""

    def algorithm(self, call: Any, algorithms: Callable[[], Mapping[str, Callable[..., Any]]], guess: str) -> str:
        """Return the name of the algorithm."""


class Rules(NamedTuple):
    """The rules for the calls into one model, and for their backward."""

    operators: Mapping[str, OperatorRule] = {}  # how listed operators are computed under autocast, by operator name
    policy: ProductPolicy | None = None  # decides which fp32 products round their inputs; None: none of them
    kernels: frozenset[str] = frozenset()  # the C files whose functions may compute fp32 tensors
    #: Whether these functions are used wherever possible: in reduced precision, where few tensors are fp32.
    takes_kernels: bool = False
    chooser: Chooser | None = None  # chooses the measured algorithms; None: the default choices apply
    owner: int = 0  # the id of the interceptor that owns these rules


NO_RULES = Rules()


class _Graphs:
    """For each call of a thread, the sequence numbers of its first node and of the end of its range, and its rules."""

    def __init__(self) -> None:
        self.starts, self.ends = array("Q"), array("Q")
        self.rules: list[Rules] = []
        #: Node ranges computed without the policy in a call that has not ended.
        self.without_policy: list[tuple[int, int]] = []


class CallState(threading.local):
    """The state of the intercepted call that this thread is in."""

    #: By module id. A module has several if several threads or nested runs have set it up. Shared by all threads.
    interceptors: dict[int, tuple[Any, ...]] = process_wide("interceptors of calls, by module", {})
    #: Functions around calls into modules without interceptors, in all threads: of the function, the module, arguments.
    watchers: list[Callable[..., Any]] = process_wide("watchers of calls", [])

    def __init__(self) -> None:
        self.in_call = False  # an intercepted one; on the object: `torch.compile` guards on its presence
        self.accelerated = False  # whether that call is into a set-up model, and should not run like the plain loop
        self.modules = NONE  # by module id
        self.rules = NO_RULES
        self.watched = False  # whether the thread is inside a call that went through a watcher
        self.has_no_policy = False  # whether products are currently in fp32 regardless of the rules
        self.graphs = _Graphs()  # of this thread's calls
        self.copies: Any = None  # the state of `nano_loop.kernels.narrow_copies` in this thread
        #: Callbacks to run at the end of this thread's outermost backward while an inner one runs; None otherwise.
        self.at_end: list[Callable[[], None]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle an empty state, because cloudpickle pickles a bound method with its globals."""
        return SimpleNamespace, (), {"in_call": False, "interceptors": {}, "watchers": (), "watched": False}


call_state = CallState()


def rules_now() -> Rules | None:
    """Return the rules of the current call, or of the call whose backward is running; None outside of set-up models."""
    rules: Rules | None = call_state.rules
    if not call_state.accelerated:
        number = current_node_number()
        rules = None if number is None else rules_of_node(number)
    return rules._replace(policy=None) if rules is not None and call_state.has_no_policy else rules


@contextmanager
def without_policy() -> Iterator[None]:
    """Compute all products in the body, and those in their backward, in fp32."""
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
    """Run the body as a call into a set-up model with these rules."""
    before = call_state.accelerated, call_state.rules
    call_state.accelerated, call_state.rules = True, rules
    try:
        yield
    finally:
        call_state.accelerated, call_state.rules = before


def note_graph(start: int, end: int, rules: Rules = NO_RULES) -> None:
    """Record that the nodes in ``range(start, end)`` were created in a call into a set-up model with these rules."""
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


def rules_of_node(number: int) -> Rules | None:
    """Return the rules of this thread's call that created the node with this number, or None."""
    graphs = call_state.graphs
    place = bisect_right(graphs.starts, number) - 1
    return graphs.rules[place] if place >= 0 and number < graphs.ends[place] else None


def forget_graphs() -> None:
    """Forget the graphs of this thread's calls."""
    call_state.graphs = _Graphs()
