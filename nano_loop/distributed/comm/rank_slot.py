"""The resources of a process in one run: its rank, and its share of the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nano_loop.config.options import Options
from nano_loop.cpu import Machine, Share, given_shares, partition
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoConfigError, error_message


@dataclass
class RankSlot:
    """The position of one process in one run."""

    ranks: Ranks  # as this process sees them
    machine: Machine  # the part available to this process: its share of the CPUs and of the quota
    host: Machine  # the part available to all ranks of this host together
    copied: int = 0  # the bytes of large arguments that rank 0 copied to shared memory for the other ranks


def shares_of(options: Options, machine: Machine, ranks: Sequence[int]) -> tuple[Share, ...]:
    """Return a share of `machine` for each of its `ranks`; raise a `NanoConfigError` if there are too few cores."""
    chosen = options.cpu_for_each_process
    if chosen is None:
        return partition(machine, len(ranks))
    if not hasattr(os, "sched_setaffinity"):
        expected = f"{sys.platform} cannot bind processes to CPUs"
        raise NanoConfigError(error_message(options.as_written["cpu_for_each_process"], expected, "Omit it"))
    if isinstance(chosen, int):
        return partition(machine, len(ranks), chosen)
    return given_shares(machine, [chosen[rank] for rank in ranks])
