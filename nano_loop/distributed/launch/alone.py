"""The run of a single process, which starts nothing and talks to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nano_loop.cpu import Machine, bound, restricted
from nano_loop.distributed.launch.launcher import Launcher, Task
from nano_loop.distributed.ranks import Ranks
from nano_loop.distributed.seat import Seat, shares_of


class Alone(Launcher):
    """One rank, this process. Only with ``cpu_for_each_process`` is it bound to CPUs."""

    def expected_ranks(self) -> Ranks:
        """See `Launcher.expected_ranks`."""
        return Ranks()

    @contextmanager
    def joined(self, machine: Machine, task: Task | None) -> Iterator[Seat]:
        """See `Launcher.joined`."""
        if self.options.cpu_for_each_process is None:
            yield Seat(Ranks(), machine, machine)
            return
        (share,) = shares_of(self.options, machine, [0])
        with bound(share.cpus):
            ranks = Ranks(shares=(share.cpus,), loader_cpus=share.loader_cpus)
            yield Seat(ranks, restricted(machine, share, 1), machine)
