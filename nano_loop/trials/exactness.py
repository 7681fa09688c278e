"""Says whether candidates compute what the plain model does, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nano_loop.settings import Settings
from nano_loop.trials.candidates import OF_NUMBERS, changed, for_trial
from nano_loop.trials.live import Measured

#: The largest error of the loss, relative to fp64, with which a candidate may be chosen. A model that computes
#: something else under autocast does so by hand as well, so `verify` finds no fault there.
TOLERANCE = 0.1
_NOT_EXACT = "not exact: "


class Exactness:
    """The comparisons of one search. Candidates whose options leave the numbers equal are compared once.

    Parameters
    ----------
    start : Settings
        The options that the search begins with.
    compare : callable
        Takes the settings of a candidate, and what was measured of it. Returns what `verify` has found, as a dict: a
        ``"fault"``, if there is one, the error of the ``"loss"``, and a ``"remark"`` where nothing was compared.
    """

    def __init__(self, start: Settings, compare: Callable[[Settings, Measured], dict[str, Any]]) -> None:
        self._start = start
        self._compare = compare
        self._found: dict[str, dict[str, Any]] = {}

    def holds(self, candidate: Measured, others: Sequence[Measured]) -> bool:
        """Return whether a candidate's numbers are exact; note what was found at it, and at others with its numbers."""
        key = self._numbers_of(candidate)
        if key not in self._found:
            self._found[key] = self._compare(changed(for_trial(self._start), candidate.changes), candidate)
        found = candidate.comparison = self._found[key]
        for each in others:
            if each.seconds and not each.is_plain and self._numbers_of(each) == key:
                each.comparison = found
        fault, loss = found.get("fault"), found.get("loss") or 0.0
        if fault:
            candidate.note = f"{_NOT_EXACT}{fault} is off by more than rounding"
        elif loss > TOLERANCE:
            candidate.note = f"{_NOT_EXACT}the loss is off by {loss:.0%}"
        return not candidate.note.startswith(_NOT_EXACT)

    def not_faulty(self, candidates: Sequence[Measured]) -> list[Measured]:
        """Return the candidates whose numbers were not found to be faulty."""
        faulty = [self._numbers_of(each) for each in candidates if each.note.startswith(_NOT_EXACT)]
        return [each for each in candidates if self._numbers_of(each) not in faulty]

    def _numbers_of(self, measured: Measured) -> str:
        """Return what the numbers of a candidate depend on."""
        options = changed(for_trial(self._start), measured.changes).options
        return repr([getattr(options, name) for name in OF_NUMBERS])
