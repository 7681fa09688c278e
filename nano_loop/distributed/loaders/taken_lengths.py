"""Warns of lengths by which a loop under several ranks would divide what it has summed up wrongly."""

from __future__ import annotations

import re
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.distributed.ranks import Ranks
from nano_loop.errors import problem
from nano_loop.intercept.user_code import Place, is_running, users_place, warn_once

#: ``len(loader.dataset)``, also with ``self.loaders["train"]`` for the loader.
_LENGTH_OF_DATASET = re.compile(r"len\(\s*([^()=]*\.dataset)\s*\)")

_LATER = "Take len(loader) after the iteration, or count the batches in it"


class TakenLengths:
    """The lengths of one loader that the loop has taken, and what they turn out to be once batches arrive.

    Parameters
    ----------
    ranks : Ranks
        The ranks among which the loader is divided. Only rank 0 warns, once a run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._of_loader: tuple[Place, int, int] | None = None
        self._of_dataset: tuple[Place, str, int] | None = None
        self._divided = False  # whether a batch of a share has arrived

    def of_loader(self, share: int, length: int, *, evaluating: bool) -> None:
        """Take note that the user's code was given the length of a share, perhaps for an evaluation that follows."""
        place = users_place() if self._ranks.rank == 0 and (evaluating or not self._divided) else None
        if place is not None:
            self._of_loader = place, share, length

    def of_dataset(self, loader: DataLoader[Any]) -> None:
        """Take note that the user's code reads the dataset of a divided loader, and warn if it takes its length."""
        place = None if self._ranks.rank else users_place()
        called = place and _LENGTH_OF_DATASET.search(place.text)
        if place and called:
            self._of_dataset = place, called[0], len(loader.dataset)  # type: ignore[arg-type]
            if self._divided:
                self.warn_of_dataset()

    def begin(self, loader: DataLoader[Any], whole: bool) -> None:
        """Take note that an iteration starts; warn if the same function took the length as that of a share."""
        taken, self._of_loader = self._of_loader, None
        if whole:
            self._of_dataset = None
            if taken and is_running(taken[0].code):
                place, share, length = taken
                given = f"len(loader) was {share}, the batches of one of {self._ranks.size} ranks"
                needed = f"the evaluation that follows takes all {length}"
                self._warn("len(loader)", place, problem(given, needed, _LATER))

    def warn_of_dataset(self) -> None:
        """Take note that a batch of a share has arrived; warn if the dataset's length was taken."""
        self._divided = True
        taken, self._of_dataset = self._of_dataset, None
        if taken:
            place, expression, length = taken
            size = self._ranks.size
            given = f"{expression} is {length}, the samples of all {size} ranks"
            needed = f"each rank takes 1/{size} of them, so a sum over its batches has another divisor"
            advice = f"Count them in the loop, seen += len(x), and divide by seen instead of {expression}"
            self._warn("len(loader.dataset)", place, problem(given, needed, advice))

    def _warn(self, what: str, place: Place, message: str) -> None:
        if what not in self._ranks.context.sharding.warned:
            self._ranks.context.sharding.warned.add(what)
            warn_once(message, place)
