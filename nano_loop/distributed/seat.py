"""What a process has in one run: its place among the ranks, and its part of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import Ranks


@dataclass
class Seat:
    """The place of one process in one run.

    Parameters
    ----------
    ranks : Ranks
        The ranks as this process sees them.
    machine : Machine
        The machine as this process may use it: its share of the CPUs, and its part of the quota.
    host : Machine
        The machine as all ranks of this host may use it together.
    """

    ranks: Ranks
    machine: Machine
    host: Machine
