"""The payload of a worker: the task, the slots of the ranks, and the state of the caller's process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nano_loop.config.options import Options
from nano_loop.data.random_states import process_states, set_process_states
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.launch.launcher import Task
from nano_loop.distributed.payload.payload import dump
from nano_loop.errors import NanoError, NanoWorkerError
from nano_loop.integrations.cuda_calls.patching import is_cuda_patched, patch_cuda

# Folders of what is pickled for the workers.
PAYLOAD, WORKER_INIT = "payload", "worker_init"


@dataclass
class State:
    """Settings of the caller's process that a worker takes over, so that it computes the same."""

    settings: list[Callable[[], object]]
    threads: int | None
    warning_filters: list[Any]

    @classmethod
    def of_this_process(cls, usual_threads: int) -> State:
        """Read it.

        Parameters
        ----------
        usual_threads : int
            The compute threads that torch would have here: fewer mean that the user has chosen.
        """
        states, threads = process_states(), torch.get_num_threads()
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        settings: list[Callable[[], object]] = [
            *([patch_cuda] if is_cuda_patched() else []),
            partial(set_process_states, states, [True] * len(states)),
            partial(torch.set_default_dtype, torch.get_default_dtype()),
            partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
            partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns_only),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        ]
        return cls(settings, threads if threads < usual_threads else None, [*warnings.filters])

    def take_over(self, threads: int) -> None:
        """Put it in force in a worker, which has `threads` compute threads at the most."""
        for put_in_force in self.settings:
            put_in_force()
        if self.threads is not None:
            torch.set_num_threads(min(self.threads, threads))
        warnings.resetwarnings()
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]


@dataclass
class Assignment:
    """What a worker is to do, as it comes in the payload.

    Parameters
    ----------
    task : Task
        What every rank does.
    state : State
        torch's settings, and the random states.
    options : Options
        The options of the run.
    slots : list of RankSlot
        The slots of all ranks, by rank; empty where they are known when the ranks have joined.
    """

    task: Task
    state: State
    options: Options
    slots: list[RankSlot] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.options.processes


def write_payload(payload: object, folder: Path, names: Mapping[str, Any], worker_init: object = None) -> int:
    """Write what the workers read to new folders in `folder`.

    Parameters
    ----------
    payload : object
        What they are to do, such as an `Assignment`.
    folder : pathlib.Path
        The run's, in the shared-memory file system.
    names : mapping of str to Any
        See `Task`.
    worker_init : callable, optional
        What they call before they read the payload.

    Returns
    -------
    int
        The bytes of the large storages and arrays that were copied.

    Raises
    ------
    NanoWorkerError
        If something cannot be pickled, or a worker would import other code.
    """
    try:
        if worker_init is not None:
            (folder / WORKER_INIT).mkdir()
            dump(worker_init, folder / WORKER_INIT, {"worker_init": worker_init})
        (folder / PAYLOAD).mkdir()
        return dump(payload, folder / PAYLOAD, names)
    except NanoError as error:
        raise NanoWorkerError(str(error), rank=0) from error
