"""An operator with several algorithms, and the choice of one of them for a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from nano_loop.autotune.decisions import Decision, Decisions, measure_or_guess
from nano_loop.autotune.tuner import Race, Tuner
from nano_loop.kernels.replacement import Algorithms, Choose
from nano_loop.patching.deterministic_mode import may_depend_on_times

#: What `_kind` looks into.
_COMPOSED = (Tensor, tuple, list, float)


class TunedOperator(NamedTuple):
    """An operator with several algorithms.

    Attributes
    ----------
    rule : str
        The name of the rule by which its kernel asks for the algorithm of a call.
    key : callable
        Takes a call. Returns what the fastest algorithm depends on, in words.
    race : callable
        Takes a call and its algorithms by name. Returns the race between them, or None for a call that is not measured.
    has_gradients : bool
        Whether calls in a backward may be those of gradients, and not only of layers that a checkpoint calls again.
    """

    rule: str
    key: Callable[[Any], str]
    race: Callable[[Any, Mapping[str, Callable[..., Any]]], Race | None]
    has_gradients: bool = False

    def chooser(self, tuner: Tuner) -> Choose:
        """Return the rule of a model, which remembers what was decided about the model's calls."""
        decisions = Decisions(tuner, self.has_gradients)

        def choose(call: Any, algorithms: Algorithms, guess: str) -> str:
            if not may_depend_on_times():
                return guess
            return decisions.algorithm(
                _kind(call),
                lambda: guess,
                lambda: self._decision(tuner, call, algorithms(), guess),
                lambda: self._stored(tuner, call, algorithms()),
            )

        return choose

    def _stored(self, tuner: Tuner, call: Any, algorithms: Mapping[str, Callable[..., Any]]) -> str | None:
        choice = tuner.choices.get(self.key(call)) if self.race(call, algorithms) is not None else None
        return choice.algorithm if choice is not None and choice.algorithm in algorithms else None

    def _decision(self, tuner: Tuner, call: Any, algorithms: Mapping[str, Callable[..., Any]], guess: str) -> Decision:
        race = self.race(call, algorithms) if len(algorithms) > 1 else None
        if race is None:
            return Decision(guess)
        decision = measure_or_guess(guess, lambda: tuner.choose(self.key(call), guess, lambda: race))
        # A choice of another version may be none here.
        return decision if decision.algorithm in algorithms else Decision(guess)


def _kind(value: Any) -> Hashable:
    """Return what calls have in common that are computed alike."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_kind(part) if isinstance(part, _COMPOSED) else part for part in value])
    return value != 0 if isinstance(value, float) else value
