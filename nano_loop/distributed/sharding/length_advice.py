"""A warning of a length that was taken in training, and by which an evaluation would divide."""

from __future__ import annotations

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import error_message
from nano_loop.patching.user_code import Place, is_running, users_place, warn_once

_WARNING = "len(loader)"
_ADVICE = "Take len(loader) after the iteration, or count the batches in it"


class LengthAdvice:
    """Notes where the loop takes the length of one loader, and warns if an evaluation of the same function follows.

    Parameters
    ----------
    ranks : Ranks
        The ranks among which the loader is divided. Only rank 0 warns, once a run.

    Attributes
    ----------
    training : bool
        Whether a batch of a share has arrived. A length that is then taken in train mode belongs to the training.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._taken: tuple[Place, int, int] | None = None
        self.training = False

    def of_loader(self, share: int, length: int, *, evaluating: bool) -> None:
        """Take note that the user's code was given the length of a share, perhaps for an evaluation that follows."""
        place = users_place() if self._ranks.rank == 0 and (evaluating or not self.training) else None
        if place is not None:
            self._taken = place, share, length

    def begin(self, whole: bool) -> None:
        """Take note that an iteration starts; warn if the same function took the length as that of a share."""
        taken, self._taken = self._taken, None
        if not whole or taken is None or _WARNING in self._ranks.context.sharding.warnings_given:
            return
        place, share, length = taken
        if is_running(place.code):
            self._ranks.context.sharding.warnings_given.add(_WARNING)
            got = f"len(loader) was {share}, the batches of one of {self._ranks.size} ranks"
            warn_once(error_message(got, f"the evaluation that follows takes all {length}", _ADVICE), place)
