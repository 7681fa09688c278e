"""Which ranks of a run are on which host, and what those of one host have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run that has several.

    Parameters
    ----------
    members : sequence of sequences of int
        The ranks of each host, ascending, the host of rank 0 first.
    own : int
        Which of the hosts is this rank's.
    folder : Path or None
        A private folder of this host's ranks; None where there is one rank alone.
    leaders : torch.distributed.ProcessGroup
        A group of the first rank of each host; on other ranks, what torch has for a group that a rank is not in.
    """

    members: Sequence[Sequence[int]]
    own: int
    folder: Path | None
    leaders: Any

    @property
    def here(self) -> Sequence[int]:
        """The ranks of this host."""
        return self.members[self.own]


def by_host(hosts: Sequence[object]) -> list[list[int]]:
    """Return the ranks of each host, of the host of each rank, in the order of the hosts' first ranks."""
    ranks: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return [*ranks.values()]
