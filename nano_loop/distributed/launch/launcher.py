"""The interface of launchers and of the task that every rank does; and the launcher of a single process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from nano_loop.config.options import Options
from nano_loop.cpu import Machine, bound, restricted
from nano_loop.distributed.comm.rank_slot import RankSlot, shares_of
from nano_loop.distributed.comm.ranks import Loop, Ranks


class Task(ABC):
    """The work of every rank of a run. Ranks in other processes execute a pickled copy, without `names`, for errors."""

    def __init__(self, names: Mapping[str, Any], loop: Loop) -> None:
        self.names = names
        self.loop = loop

    @abstractmethod
    def run_in(self, slot: RankSlot) -> object:
        """Execute the task in a process whose launcher has already joined the ranks. Exceptions end the run."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle."""
        return {**vars(self), "names": {}}


class Launcher(ABC):
    """Brings the ranks of one run together, and ends them together.

    To add a launcher, write a subclass in a new file or folder, and a line in
    `nano_loop.distributed.launch.join_run.choose`. A launcher does the following:

    - *slots, before the run*: `expected_ranks` returns the number of ranks and this process's rank, using only the
      options and the environment. It starts nothing and changes nothing;
    - *slots, in the run*: each rank gets a `RankSlot`: its place among the ranks, its CPUs, and a private folder if all
      ranks are on one host. All of its threads are bound to its CPUs (`nano_loop.cpu.bound`), unless the launcher does
      not control them. A slot's ``ranks.check`` raises, at any time, if another rank has failed;
    - *rendezvous*: in the body of `joined`, and in `Task.run_in`, a channel and torch's default process group connect
      the ranks: on one host through their private folder (`nano_loop.distributed.launch.group.local_group`), between
      hosts through a store that no other run uses (`process_group`). Data from the store is never unpickled
      (docs/security.md). A process group of the user's is rejected, or used and kept;
    - *sending*: a launcher that starts processes sends each of them the task in an `Assignment`, and makes it call
      `nano_loop.distributed.launch.worker.work`. The task is pickled before anything is changed, so that an object
      that cannot be pickled raises an error that names it (`nano_loop.distributed.payload`);
    - *files*: ranks other than 0 write to a private folder, which is deleted with the run
      (`nano_loop.distributed.files.folder`);
    - *watching*: a launcher that starts processes represents each by a
      `nano_loop.distributed.launch.workers.Worker`. `nano_loop.distributed.launch.ending.running_together` watches
      them, and converts the first failure into the `NanoWorkerError` that rank 0 raises;
    - *ending*: when the body of `joined` is exited, in any way, every rank has ended, and processes, process group,
      files, environment variables and affinity masks are restored.

    `join_run.joined`, rather than a launcher, decides whether a run may start alongside or inside another one.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    def expected_ranks(self) -> Ranks:
        """Return this process's place in its next run, by default rank 0; raise if the options are not supported."""
        count = self.options.processes
        return Ranks(size=count, local_size=count)

    @abstractmethod
    def joined(self, machine: Machine, task: Task | None) -> AbstractContextManager[RankSlot]:
        """Return a context in which this process is a rank, and the others do `task`, which it does itself in the body.

        `machine` is the part of the machine available to all ranks of this host together.
        """

    def prepare(self, machine: Machine) -> None:  # noqa: B027 - most launchers have nothing to prepare
        """Start slow parts before a run needs them; raise a `NanoError` if the run could not start either."""

    @property
    def needs_whole_process(self) -> bool:
        """Whether the run needs process-wide resources: the default process group, or the CPUs of all threads."""
        return self.expected_ranks().size > 1 or self.options.cpu_for_each_process is not None


class Alone(Launcher):
    """One rank, this process, bound only with ``cpu_for_each_process``; `processes` of such runs share the machine."""

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
