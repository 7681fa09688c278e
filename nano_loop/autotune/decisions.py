"""How calls are computed, by their kinds, once that was measured; and how they were computed before that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from nano_loop.autotune.tuner import Tuner
from nano_loop.patching.torch_private import in_mode
from nano_loop.patching.torch_private_autograd import current_node_number, in_backward, next_node_number

#: Maximum number of kinds that are remembered: a loop may have a new shape in each batch.
_MOST_KINDS = 1024
_SETTLED = -1


class Decision(NamedTuple):
    """How calls of one kind are computed.

    Attributes
    ----------
    algorithm : str
        The name.
    is_settled : bool
        Whether that is so for the rest of the run. Else it is a guess, for as long as the tuner's turn is the same.
    """

    algorithm: str
    is_settled: bool = True


def measure_or_guess(guess: str, measure: Callable[[], str | None]) -> Decision:
    """Measure now, outside of modes and of inference mode, and if there is time for it."""
    algorithm = None if in_mode() or torch.is_inference_mode_enabled() else measure()
    return Decision(guess, is_settled=False) if algorithm is None else Decision(algorithm)


class _Known(NamedTuple):
    """A decision that is remembered, and since when it holds.

    Attributes
    ----------
    algorithm : str
        The algorithm.
    turn : int
        The tuner's turn until whose end that is only a guess, or `_SETTLED`.
    is_gradient : bool
        Whether it is about calls of backwards only.
    since : int
        The first autograd node that was made after it was settled, if calls were computed by the guess before.
    thread : int
        The thread whose node that is: each one has its numbers.
    """

    algorithm: str
    turn: int
    is_gradient: bool
    since: int = 0
    thread: int = 0


class Decisions:
    """The decisions about some calls.

    Parameters
    ----------
    tuner : Tuner
        The one that measures.
    has_gradients : bool
        Whether what a backward calls for the first time is a gradient. Else it was called by a forward, and forgotten.
    """

    def __init__(self, tuner: Tuner, has_gradients: bool = False) -> None:
        self._tuner = tuner
        self._has_gradients = has_gradients
        self._known: dict[Hashable, _Known] = {}
        self._has_forgotten = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def algorithm(
        self,
        key: Hashable,
        guess: Callable[[], str],
        decide: Callable[[], Decision],
        stored: Callable[[], str | None],
    ) -> str:
        """Return how a call is computed.

        Parameters
        ----------
        key : hashable
            Its kind.
        guess : callable
            Returns the algorithm of such calls before it is decided.
        decide : callable
            Decides, where that was not done in this turn.
        stored : callable
            Returns the algorithm that was measured before, if there is one, for a call whose decision is forgotten.
        """
        known, is_gradient = self._known.get(key), False
        if not in_backward():
            known = None if known is not None and known.is_gradient else known
        else:
            is_gradient = self._has_gradients if known is None else known.is_gradient
            # An activation checkpoint calls again in the backward, and has to compute as its forward did.
            if not is_gradient:
                if known is None:
                    return stored() or guess()
                before = known.thread == threading.get_ident() and (current_node_number() or 0) < known.since
                return guess() if before else known.algorithm
        if known is None or known.turn not in (_SETTLED, self._tuner.turn):
            is_first = is_gradient or (known is None and not self._has_forgotten)
            known = self._settled(decide(), is_first, is_gradient)
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
                self._has_forgotten = True
            self._known[key] = known
        return known.algorithm

    def _settled(self, decision: Decision, is_first: bool, is_gradient: bool) -> _Known:
        if not decision.is_settled:
            return _Known(decision.algorithm, self._tuner.turn, is_gradient)
        since = 0 if is_first else next_node_number()
        return _Known(decision.algorithm, _SETTLED, is_gradient, since, threading.get_ident())
