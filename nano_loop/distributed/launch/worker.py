"""The data sent to a worker process (its task, the ranks' slots, the state of the caller's process), and its work."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nano_loop.config.options import Options
from nano_loop.data.random_states import process_states, set_process_states
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.private_files import explaining, guard_files, redirect_files
from nano_loop.distributed.launch.active_runs import of_ranks, running, whole_process
from nano_loop.distributed.launch.failure import flush_output
from nano_loop.distributed.launch.launcher import Task
from nano_loop.distributed.launch.stream import Reporter
from nano_loop.distributed.payload.payload import dump, load
from nano_loop.errors import NanoError, NanoWorkerError
from nano_loop.integrations.cuda_calls import is_cuda_patched, patch_cuda
from nano_loop.integrations.rank_zero import note_rank
from nano_loop.storage.trusted_files import opened_folder, path_of

# Folders of the data pickled for the workers.
PAYLOAD, WORKER_INIT = "payload", "worker_init"
_MKLDNN_OPERATIONS = ("matmul", "conv", "rnn")


@dataclass
class State:
    """Settings of the caller's process that a worker copies to compute the same results."""

    settings: list[Callable[[], object]]
    threads: int | None
    warning_filters: list[Any]

    @classmethod
    def of_this_process(cls, usual_threads: int) -> State:
        """Read the settings of this process; the user has chosen its threads if they are less than `usual_threads`."""
        states, threads = process_states(), torch.get_num_threads()
        settings: list[Callable[[], object]] = [
            *([patch_cuda] if is_cuda_patched() else []),
            partial(set_process_states, states, [True] * len(states)),
            *_current_settings(),
        ]
        return cls(settings, threads if threads < usual_threads else None, [*warnings.filters])

    def take_over(self, threads: int) -> None:
        """Apply the settings in a worker that has at most `threads` compute threads."""
        for put_in_force in self.settings:
            put_in_force()
        if self.threads is not None:
            torch.set_num_threads(min(self.threads, threads))
        warnings.resetwarnings()
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]


def _current_settings() -> list[Callable[[], object]]:
    """Return functions that apply the settings of this process's libraries in another one."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    checks_nan = torch.is_anomaly_check_nan_enabled()
    # torch has no function that returns it. The program may have set another default dtype or device.
    is_flushing = not torch.tensor(1e-40, dtype=torch.float32, device="cpu").mul(1.0).item()
    return [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns_only),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled(), checks_nan),
        partial(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu")),
        partial(torch.set_flush_denormal, is_flushing),
        partial(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
        partial(torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled()),  # type: ignore[no-untyped-call]
        partial(_set_mkldnn, bool(torch.backends.mkldnn.enabled), _matmul_precision(), _mkldnn_precisions()),
        partial(np.seterr, **np.geterr()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
    ]


def _matmul_precision() -> str | None:
    """Return the precision of `torch.set_float32_matmul_precision`, or None if it has not been called."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has used ``torch.backends.mkldnn.matmul.fp32_precision`` instead
        return None
    return None if precision == "highest" else precision


def _mkldnn_precisions() -> dict[str, str]:
    """Return the precisions of mkldnn's operations that are set; torch 2.8 has none."""
    operations = {name: getattr(torch.backends.mkldnn, name, None) for name in _MKLDNN_OPERATIONS}
    precisions = {name: getattr(operation, "fp32_precision", "none") for name, operation in operations.items()}
    return {name: precision for name, precision in precisions.items() if precision != "none"}


def _set_mkldnn(enabled: bool, matmul_precision: str | None, precisions: dict[str, str]) -> None:
    if matmul_precision is not None:
        torch.set_float32_matmul_precision(matmul_precision)
    for name, precision in precisions.items():
        getattr(torch.backends.mkldnn, name).fp32_precision = precision
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]


@dataclass
class Assignment:
    """The work of a worker, as sent in the payload; slots may only be known once the ranks have joined."""

    task: Task
    state: State
    options: Options
    slots: list[RankSlot] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.options.processes


def write_payload(assignment: Assignment, folder: Path) -> int:
    """Write `worker_init` and the assignment to the run's folder; return the bytes of large objects copied."""
    worker_init = assignment.options.worker_init
    try:
        if worker_init is not None:
            (folder / WORKER_INIT).mkdir()
            dump(worker_init, folder / WORKER_INIT, {"worker_init": worker_init})
        (folder / PAYLOAD).mkdir()
        return dump(assignment, folder / PAYLOAD, assignment.task.names)
    except NanoError as error:
        raise NanoWorkerError(str(error), rank=0) from error


Join = Callable[[Assignment, int], AbstractContextManager[RankSlot]]


def work(reporter: Reporter, folder: Path, join: Join, *, payload: Path) -> None:
    """Run a worker process: read its payload, do the task, and report the outcome.

    Changes to the process (torch's settings, its seeds, its files) are not undone, because it ends with the run.
    """
    note_rank(reporter.rank)
    where = ""
    try:
        with opened_folder(payload) as opened:
            _keep_sockets_in(folder)
            redirect_files(folder, reporter.rank)
            sent_by_rank_0 = path_of(opened, payload)
            if (sent_by_rank_0 / WORKER_INIT).exists():
                where = " in worker_init"
                load(sent_by_rank_0 / WORKER_INIT)()
                where = ""
            assignment: Assignment = load(sent_by_rank_0 / PAYLOAD)
        task = assignment.task
        guard_files()  # only after `load`: it denies access to rank 0's descriptors, which `load` may map
        gc.freeze()  # exclude imported objects from garbage collection
        gc.enable()
        reporter.report("ready")
        whole = whole_process("this worker process", of_ranks(assignment.size))
        with explaining(), whole, join(assignment, reporter.rank) as slot:
            assignment.state.take_over(slot.machine.num_threads)
            # A pickled optimizer has lost its scheduler's mark, but not its scheduler.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            with running(slot, task):
                task.run_in(slot)
    except BaseException as error:
        reporter.report_failure(error, where)
    else:
        flush_output()
        reporter.report("finished")


def _keep_sockets_in(folder: Path) -> None:
    """Put multiprocessing's folder where rank 0 deletes it, at a short path: a socket's has at most 107 letters."""
    place = folder / f"pymp-{os.getpid()}"
    place.mkdir(mode=0o700)
    # There is no public name for it; multiprocessing's own children inherit it in the same way.
    multiprocessing.current_process()._config["tempdir"] = str(place)  # type: ignore[attr-defined]
