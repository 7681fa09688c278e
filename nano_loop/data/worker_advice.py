"""DataLoader's warning about its number of workers, for a process that is bound to a part of its CPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.patching.attributes import replaced


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
