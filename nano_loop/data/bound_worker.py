"""The processes of a loader, on the CPUs that their rank has for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any


class BoundWorker:
    """Binds a loader's worker process to some CPUs, and then does what the loader's own ``worker_init_fn`` does.

    Parameters
    ----------
    cpus : tuple of int
        The logical CPUs; if the system refuses them, nothing is bound.
    then : callable, optional
        The loader's own.
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
