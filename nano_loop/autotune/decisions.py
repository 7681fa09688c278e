"""How calls are computed, by their kinds, once that was measured; and how they were computed before that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from nano_loop.autotune.tuner import Tuner
from nano_loop.patching.torch_private import current_node_number, in_backward, in_mode, next_node_number

#: Maximum number of kinds that are remembered: a loop may have a new shape in each batch.
_MOST_KINDS = 256
_SETTLED = -1


class Decision(NamedTuple):
    """How calls of one kind are computed.

    Attributes
    ----------
    way : str
        The way.
    is_settled : bool
        Whether that is so for the rest of the run. Else it is a guess, for as long as the tuner's turn is the same.
    """

    way: str
    is_settled: bool = True


def decided(guess: str, measure: Callable[[], str | None]) -> Decision:
    """Measure a way now, outside of modes and of inference mode, and if there is time for it."""
    way = None if in_mode() or torch.is_inference_mode_enabled() else measure()
    return Decision(guess, is_settled=False) if way is None else Decision(way)


class _Known(NamedTuple):
    """A decision that is remembered, and since when it holds.

    Attributes
    ----------
    way : str
        The way.
    turn : int
        The tuner's turn until whose end that is only a guess, or `_SETTLED`.
    since : int
        The first autograd node that was made after it was settled, if calls were computed by the guess before.
    thread : int
        The thread whose node that is: each one has its numbers.
    """

    way: str
    turn: int
    since: int = 0
    thread: int = 0


class Decisions:
    """The decisions about some calls.

    Parameters
    ----------
    tuner : Tuner
        The one that measures.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._known: dict[Hashable, _Known] = {}
        self._has_forgotten = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def way(
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
            Returns the way of such calls before it is decided.
        decide : callable
            Decides, where that was not done in this turn.
        stored : callable
            Returns the way that was measured before, if there is one, for a call whose decision is forgotten.
        """
        found = self._known.get(key)
        # An activation checkpoint calls again in the backward, and has to compute as its forward did.
        if in_backward():
            if found is None:
                return stored() or guess()
            before = found.thread == threading.get_ident() and (current_node_number() or 0) < found.since
            return guess() if before else found.way
        if found is None or found.turn not in (_SETTLED, self._tuner.turn):
            found = self._decided(decide(), is_first=found is None and not self._has_forgotten)
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
                self._has_forgotten = True
            self._known[key] = found
        return found.way

    def _decided(self, decision: Decision, is_first: bool) -> _Known:
        if not decision.is_settled:
            return _Known(decision.way, self._tuner.turn)
        return _Known(decision.way, _SETTLED, 0 if is_first else next_node_number(), threading.get_ident())
