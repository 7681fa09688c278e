"""The work that every rank of a run does, as launchers know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.ranks import Loop


class Task(ABC):
    """What every rank of a run does. Picklable: ranks in other processes execute a copy.

    Parameters
    ----------
    names : mapping of str to Any
        The user's objects in the task, by their names in the user's code. An error about an object that cannot be
        pickled uses these names. The mapping itself is not pickled.
    loop : Loop
        The user's function, for messages.
    """

    def __init__(self, names: Mapping[str, Any], loop: Loop) -> None:
        self.names = names
        self.loop = loop

    @property
    def modules(self) -> Sequence[str]:
        """The modules that a worker's process may import beforehand: by default the module of the class."""
        return [type(self).__module__]

    @abstractmethod
    def run_in(self, slot: RankSlot) -> object:
        """Execute the task in a process whose launcher has already joined the ranks; what it raises ends the run."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle."""
        return {**vars(self), "names": {}}
