"""The worker processes of a loader: their CPUs, and torch's warning about their number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.patching.attributes import replaced


class BoundWorker:
    """Binds a loader's worker to CPUs, if the system allows it, and then calls the loader's own ``worker_init_fn``."""

    def __init__(self, cpus: tuple[int, ...], then: Callable[[int], Any] | None) -> None:
        self.cpus = cpus
        self.then = then

    def __call__(self, worker: int) -> None:
        """Bind worker number `worker` and call its function."""
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # the process may not use these CPUs; it also works on others
                os.sched_setaffinity(0, self.cpus)
        if self.then is not None:
            self.then(worker)


def advice_of_plain_run(cpus: int) -> AbstractContextManager[None]:
    """Make loaders warn only about more workers than the CPUs of the unbound process, as in a plain run."""

    def make(check: Callable[[DataLoader[Any]], None]) -> Callable[[DataLoader[Any]], None]:
        def check_worker_number_rationality(loader: DataLoader[Any]) -> None:
            if loader.num_workers > cpus:
                check(loader)

        return check_worker_number_rationality

    return replaced(DataLoader, "check_worker_number_rationality", make)
