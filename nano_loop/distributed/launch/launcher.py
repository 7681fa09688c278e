"""The contract of a launcher, and of the work that it has every rank do; and the run of one process alone."""

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

    @abstractmethod
    def run_in(self, slot: RankSlot) -> object:
        """Execute the task in a process whose launcher has already joined the ranks; what it raises ends the run."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle."""
        return {**vars(self), "names": {}}


class Launcher(ABC):
    """Brings the ranks of one run together, and lets them end together.

    Whoever adds a launcher writes a subclass, in a new file or folder, and a line in
    `nano_loop.distributed.launch.join_run.choose`. A launcher has to do six things, the first of them twice:

    - *slots, before the run*: `expected_ranks` says how many ranks there will be and which this process is, from the
      options and the environment alone. It starts nothing and changes nothing;
    - *slots, in the run*: each rank gets a `RankSlot`: its place among the ranks, its CPUs, and a private folder where
      all ranks are on one host. It is bound to its CPUs with every thread (`nano_loop.cpu.bound`), unless they are not
      the launcher's to give. A slot's ``ranks.check`` raises, at any time, if another rank has failed;
    - *rendezvous*: in the body of `joined`, and in `Task.run_in`, a channel and torch's default process group connect
      the ranks: on one host through their private folder (`nano_loop.distributed.launch.group.local_group`), between
      hosts over a store that no other run uses (`process_group`). What is read from the store is never
      unpickled (docs/security.md). A process group of the user's is refused, or used and left;
    - *sending*: a launcher that starts processes sends each the task, in an `Assignment`, and has it call
      `nano_loop.distributed.launch.worker.work`. The task is pickled before anything is changed, so that what
      cannot be pickled is an error by name (`nano_loop.distributed.payload`);
    - *files*: a rank other than 0 writes to a private folder, which is deleted with the run
      (`nano_loop.distributed.files.folder`);
    - *watching*: a launcher that starts processes describes each as a
      `nano_loop.distributed.launch.workers.Worker`. `nano_loop.distributed.launch.ending.running_together` watches
      them, and turns the first failure into the `NanoWorkerError` that rank 0 raises;
    - *ending*: when the body of `joined` is left, in whatever way, every rank has ended, and processes, process group,
      files, environment variables and affinity masks are as they were before.

    Whether a run may begin beside or inside another is not a launcher's concern: `join_run.joined` sees to it.

    Parameters
    ----------
    options : Options
        The options of the run.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    def expected_ranks(self) -> Ranks:
        """Return this process's place in its next run, as far as it is known before.

        By default, it is rank 0, and starts the others.

        Raises
        ------
        NanoConfigError
            If the options ask for what this launcher cannot give.
        """
        count = self.options.processes
        return Ranks(size=count, local_size=count)

    @abstractmethod
    def joined(self, machine: Machine, task: Task | None) -> AbstractContextManager[RankSlot]:
        """Return a context in which this process is a rank of the run, and the other ranks do `task`.

        Parameters
        ----------
        machine : Machine
            What all ranks of this host may use together.
        task : Task
            What the processes that are started do; this process does it itself, in the body of the context.

        Raises
        ------
        NanoError
            If the ranks cannot come together.
        NanoWorkerError
            If another rank fails; raised when the context is left.
        """

    def prepare(self, machine: Machine) -> None:  # noqa: B027 - most launchers have nothing to prepare
        """Start what takes long, before a run needs it. By default, nothing does.

        Parameters
        ----------
        machine : Machine
            What all ranks of this host may use together.

        Raises
        ------
        NanoError
            If the run cannot start either.
        """

    @property
    def needs_whole_process(self) -> bool:
        """Whether the run takes what a process has once: the default process group, or the CPUs of all threads."""
        return self.expected_ranks().size > 1 or self.options.cpu_for_each_process is not None


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
