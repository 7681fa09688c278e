"""The process group of a run: made when it begins, destroyed when it ends."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import psutil  # type: ignore[import-untyped,unused-ignore]
import torch
from torch import distributed
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from nano_loop.distributed.ranks import Ranks
from nano_loop.environment import Launch
from nano_loop.errors import NanoError, problem
from nano_loop.fabric import SLURMEnvironment
from nano_loop.options import Options

_INTERFACE = "GLOO_SOCKET_IFNAME"
_stores: dict[tuple[str, int], Store] = {}  # a server has to outlive the runs that meet on it
_runs: dict[tuple[str, int], int] = {}


@contextmanager
def process_group(
    backend: str | None, store: Store, rank: int, size: int, timeout: float, *, local: bool
) -> Iterator[None]:
    """Make torch's default process group, and destroy it on leaving.

    Parameters
    ----------
    backend : str or None
        torch.distributed's name; None means gloo.
    store : torch.Store
        Where the ranks meet.
    rank, size : int
        This rank, and how many there are.
    timeout : float
        Seconds that a collective may take.
    local : bool
        Whether all ranks are on this host, and so meet on its loopback interface.
    """
    with _on_loopback() if local else nullcontext(), _own_excepthook(), _without_greeting():
        distributed.init_process_group(
            backend or "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()  # a process that leaves with work in flight is aborted


def refuse_existing_group() -> None:
    """Raise where the process is in a group already, for torch has one default group a process."""
    if distributed.is_available() and distributed.is_initialized():
        given = f"this process is in a process group of {distributed.get_world_size()} already"
        needed = "num_processes makes a group of its own, and there can be one"
        raise NanoError(problem(given, needed, "Call torch.distributed.destroy_process_group() before"))


def local_group(config: Options, ranks: Ranks) -> AbstractContextManager[None]:
    """Return the process group of ranks that nano_loop has started, as a context."""
    assert ranks.folder is not None
    store = FileStore(str(ranks.folder / "store"), ranks.size)
    return process_group(config.process_group_backend, store, ranks.rank, ranks.size, config.timeout, local=True)


def outside_store(launch: Launch, environ: Mapping[str, str], timeout: float) -> Store:
    """Return a store that all ranks of a launch share, new for each run.

    Raises
    ------
    NanoError
        If the launcher does not say where the ranks can meet.
    """
    place = _meeting_place(launch, environ)
    # torchrun's agent has the server; without it, rank 0 has.
    serves = launch.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if place not in _stores:
        waiting = timedelta(seconds=timeout)
        _stores[place] = TCPStore(*place, is_master=serves, timeout=waiting, wait_for_workers=False)
    _runs[place] = _runs.get(place, 0) + 1
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"nano_loop/{attempt}/{_runs[place]}", _stores[place])


def _meeting_place(launch: Launch, environ: Mapping[str, str]) -> tuple[str, int]:
    # OpenMPI's name, and that of MPICH and Intel MPI.
    local = str(launch.size) in map(environ.get, ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    usual = _usual_place_of_srun(environ) if launch.launcher == "srun" else ("127.0.0.1", 12910) if local else ("", "")
    address, port = environ.get("MASTER_ADDR") or usual[0], environ.get("MASTER_PORT") or str(usual[1])
    if not address or not port.isdecimal():
        given = f"MASTER_ADDR={environ.get('MASTER_ADDR')}, MASTER_PORT={environ.get('MASTER_PORT')}"
        needed = f"the {launch.size} processes of {launch.launcher} meet at the address of rank 0's host"
        raise NanoError(problem(given, needed, "Set both for every rank: mpirun -x MASTER_ADDR=... -x MASTER_PORT=..."))
    return address, int(port)


def _usual_place_of_srun(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of the step, and a port that other steps and jobs are unlikely to have."""
    # A step may have a part of the job's nodes. Fabric's own answer is for jobs with --ntasks-per-node alone.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = 7 * int(job if job.isdecimal() else 0) + int(step if step.isdecimal() else 0)
    return SLURMEnvironment.resolve_root_node_address(nodes), 15000 + number % 10000


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let gloo use the loopback interface, unless the user has chosen one: a host's name need not resolve."""
    name = _loopback()
    if _INTERFACE in os.environ or name is None:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


@contextmanager
def _own_excepthook() -> Iterator[None]:
    """Keep the hook that shows exceptions: torch puts one in its place that marks every line with the rank."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Hold standard output back, and then let it go without the line in which gloo says that it is connected.

    torch 2.8 prints it, from C++, into whatever the user's script prints; 2.13 does not.
    """
    if not _greets() or not sys.platform.startswith("linux"):
        yield
        return
    try:
        output = os.dup(1)
    except OSError:  # there is none
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(output, 1)
            os.close(output)
            held.seek(0)
            rest = b"".join(line for line in held if not line.startswith(b"[Gloo] "))
            while rest:
                rest = rest[os.write(1, rest) :]


def _greets() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def _loopback() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == "127.0.0.1" for each in addresses):
            return str(name)
    return None
