"""The run of a single process, which starts nothing and talks to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from nano_loop.config.options import Options
from nano_loop.cpu import Machine, bound, restricted
from nano_loop.distributed.comm.rank_slot import RankSlot, shares_of
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.launcher import Launcher, Task


class Alone(Launcher):
    """One rank, this process. Only with ``cpu_for_each_process`` is it bound to CPUs.

    Parameters
    ----------
    options : Options
        The options of the run.
    processes : int
        How many such runs share the machine, each in a process that somebody else has started.
    """

    def __init__(self, options: Options, processes: int = 1) -> None:
        super().__init__(options)
        self._processes = processes

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        return Ranks()

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[RankSlot]:
        """See `Launcher.joined`."""
        if self.options.cpu_for_each_process is None:
            shared = self._processes > 1
            part = replace(machine, quota=machine.num_threads / self._processes) if shared else machine
            yield RankSlot(Ranks(), part, machine)
            return
        (share,) = shares_of(self.options, machine, [0])
        with bound(share.cpus):
            ranks = Ranks(shares=(share.cpus,), loader_cpus=share.loader_cpus)
            yield RankSlot(ranks, restricted(machine, share, 1), machine)
