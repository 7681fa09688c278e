"""The worker processes of a loader: the CPUs that their rank has for them, and torch's warning about their number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.patching.attributes import replaced


class BoundWorker:
    """Binds a loader's worker process to some logical CPUs, and then calls the loader's own ``worker_init_fn``.

    If the system refuses the CPUs, nothing is bound.
    """

    def __init__(self, cpus: tuple[int, ...], then: Callable[[int], Any] | None) -> None:
        self.cpus = cpus
        self.then = then

    def __call__(self, worker: int) -> None:
        """Do both in the worker of that number."""
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # they are not this process's to use, and it works on others as well
                os.sched_setaffinity(0, self.cpus)
        if self.then is not None:
            self.then(worker)


def advice_of_plain_run(cpus: int) -> AbstractContextManager[None]:
    """Let loaders warn only of more workers than CPUs before the binding, which is what a plain run counts.

    Parameters
    ----------
    cpus : int
        The CPUs that the process may use when it is not bound.
    """

    def make(check: Callable[[DataLoader[Any]], None]) -> Callable[[DataLoader[Any]], None]:
        def check_worker_number_rationality(loader: DataLoader[Any]) -> None:
            if loader.num_workers > cpus:
                check(loader)

        return check_worker_number_rationality

    return replaced(DataLoader, "check_worker_number_rationality", make)
