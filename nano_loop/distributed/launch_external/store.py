"""The store at which the processes of an external launch meet."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.errors import NanoError, error_message

_Place = tuple[str, int]  # a host, and a port

_stores: dict[_Place, Store] = {}  # a server has to outlive the runs that meet on it
_runs: dict[_Place, int] = {}


def external_store(launch: Launch, environ: Mapping[str, str], timeout: float) -> Store:
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


def _meeting_place(launch: Launch, environ: Mapping[str, str]) -> _Place:
    # OpenMPI's name, and that of MPICH and Intel MPI.
    local = str(launch.size) in map(environ.get, ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    usual = _usual_place_of_srun(environ) if launch.launcher == "srun" else ("127.0.0.1", 12910) if local else ("", "")
    address, port = environ.get("MASTER_ADDR") or usual[0], environ.get("MASTER_PORT") or str(usual[1])
    if not address or not port.isdecimal():
        got = f"MASTER_ADDR={environ.get('MASTER_ADDR')}, MASTER_PORT={environ.get('MASTER_PORT')}"
        expected = f"the {launch.size} processes of {launch.launcher} need the address and a port of rank 0's host"
        raise NanoError(
            error_message(got, expected, "Set both for every rank: mpirun -x MASTER_ADDR=... -x MASTER_PORT=...")
        )
    return address, int(port)


def _usual_place_of_srun(environ: Mapping[str, str]) -> _Place:
    """Return the first host of the step, and a port that other steps and jobs are unlikely to have."""
    from nano_loop.integrations.fabric.fabric import (
        SLURMEnvironment,  # only srun's ranks need it, and its import takes seconds
    )

    # A step may have a part of the job's nodes. Fabric's own answer is for jobs with --ntasks-per-node alone.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = 7 * int(job if job.isdecimal() else 0) + int(step if step.isdecimal() else 0)
    return SLURMEnvironment.resolve_root_node_address(nodes), 15000 + number % 10000
