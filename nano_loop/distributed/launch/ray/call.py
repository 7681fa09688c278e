"""What every actor of a run gets from the caller."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import timedelta

import torch

from nano_loop.cpu import Machine
from nano_loop.distributed.launch.assignment import State
from nano_loop.distributed.launch.external.environment import NAMES, PREFIXES
from nano_loop.distributed.launch.local.start import NOT_FOR_WORKERS as BINDING
from nano_loop.distributed.launch.task import Task
from nano_loop.options import Options
from nano_loop.version import __version__

PAYLOAD, WORKER_INIT = "payload", "worker_init"  # folders
#: The module with what actors execute. It is no import, as no process imports both it and the launcher.
WORKER = "nano_loop.distributed.launch.ray.worker"
#: By which a user sets the number of compute threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: What variables begin with that a process of a run must not have: those of other launchers, and what binds threads.
NOT_FOR_WORKERS = (*PREFIXES, *NAMES, *BINDING)


@dataclass
class Call:
    """What an actor is to do, as it comes in the payload.

    Parameters
    ----------
    task : Task
        What every rank does.
    options : Options
        The options of the run.
    state : State
        torch's settings, and the random states.
    size : int
        How many ranks there are.
    """

    task: Task
    options: Options
    state: State
    size: int

    @property
    def waiting(self) -> timedelta:
        """How long the ranks wait for each other."""
        return timedelta(seconds=self.options.timeout)


def threads_for(machine: Machine, share: tuple[int, int] | None) -> int | None:
    """Return the compute threads of a rank; None where the ranks of a node divide it.

    Parameters
    ----------
    machine : Machine
        What the process may use.
    share : (int, int) or None
        The CPUs of the rank and those of its node, as Ray counts them, which may be threads of cores.
    """
    if share is None:
        return None
    mine, all_of_them = share
    return max(1, min(mine, mine * machine.num_threads // max(all_of_them, 1)))


def without_number(options: Options) -> Options:
    """Return the options as a rank joins with: how many CPUs it has was decided when it was placed."""
    return options.without_cpus() if isinstance(options.cpu_for_each_process, int) else options


def versions() -> dict[str, str]:
    """Return the versions that have to be the same on all nodes."""
    return {"Python": platform.python_version(), "torch": torch.__version__, "nano_loop": __version__}
