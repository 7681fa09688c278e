"""A Fabric whose collectives are those of a run's ranks, and which stays behind when its object travels to a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.strategy import RanksStrategy, fabric_arguments
from nano_loop.fabric import Fabric


class RanksFabric(Fabric):
    """The Fabric in a `nano_loop.TorchNano`, made by `_be_fabric`, there and anew in each worker."""

    def _be_fabric(self, precision: str, ranks: Ranks) -> None:
        """Be a Fabric in this precision for the ranks of the runs to come."""
        own = set(vars(self))
        Fabric.__init__(self, **fabric_arguments(precision, ranks))
        if ranks.size > 1:
            Fabric.launch(self)  # starts nothing, and lets Fabric's collectives be called
        self._nano_ranks = ranks
        self._nano_fabric = frozenset(set(vars(self)) - own)

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: all but Fabric's own attributes, which are made anew where it arrives."""
        return {name: value for name, value in vars(self).items() if name not in self._nano_fabric}

    @contextmanager
    def _among(self, ranks: Ranks) -> Iterator[None]:
        """Let Fabric's collectives be those of a run."""
        if not isinstance(self.strategy, RanksStrategy):
            yield
            return
        environment = self.strategy.environment
        environment.ranks = ranks
        try:
            yield
        finally:
            environment.ranks = self._nano_ranks
