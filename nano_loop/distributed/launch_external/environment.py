"""The environment variables in which torchrun, srun and MPI pass a process its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# A launch is one where a rank has a size beside it. SLURM_NTASKS alone is not one: sbatch and salloc set it too.
# The innermost comes first: srun may have started one torchrun or one daemon of mpirun on each host.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
#: What variables of launchers begin with, and those that have other names.
PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "GROUP_", "ROLE_")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class Launch(NamedTuple):
    """The place that an external launcher has given to this process.

    Attributes
    ----------
    launcher : str
        Its name, for messages.
    rank, size : int
        Which process this is, and how many it has started.
    """

    launcher: str
    rank: int
    size: int


def found_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the place that torchrun, srun or MPI has given to this process; None if there is one process."""
    for launcher, rank, size in _LAUNCHERS:
        if environ.get(rank, "").isdecimal() and environ.get(size, "").isdecimal():
            by_srun = size == "PMI_SIZE" and environ[size] == environ.get("SLURM_STEP_NUM_TASKS")  # srun --mpi=pmi2
            launch = Launch("srun" if by_srun else launcher, int(environ[rank]), int(environ[size]))
            return launch if launch.size > 1 else None
    return None


def local_size(launch: Launch, environ: Mapping[str, str]) -> int:
    """Return how many processes there are on each host, as far as torchrun says; else all of them."""
    size = environ.get("LOCAL_WORLD_SIZE", "")
    return int(size) if size.isdecimal() and int(size) else launch.size


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that launchers set for the processes that they start."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES) and name not in NAMES}
