"""The environment variables by which torchrun, srun and MPI assign a rank to a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# A launch has both a rank and a size. SLURM_NTASKS alone does not indicate one: sbatch and salloc also set it. The
# innermost launcher comes first: srun may have started one torchrun or one mpirun daemon on each host.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
#: Prefixes of launchers' variables, including variables with other names.
PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "GROUP_", "ROLE_")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class Launch(NamedTuple):
    """The rank that an external launcher has assigned to this process. Messages name the launcher."""

    launcher: str
    rank: int
    size: int


def found_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank assigned by torchrun, srun or MPI; None if there is only one process."""
    for launcher, rank, size in _LAUNCHERS:
        if environ.get(rank, "").isdecimal() and environ.get(size, "").isdecimal():
            by_srun = size == "PMI_SIZE" and environ[size] == environ.get("SLURM_STEP_NUM_TASKS")  # srun --mpi=pmi2
            launch = Launch("srun" if by_srun else launcher, int(environ[rank]), int(environ[size]))
            return launch if launch.size > 1 else None
    return None


def local_size(launch: Launch, environ: Mapping[str, str]) -> int:
    """Return the number of processes per host if torchrun specifies it; otherwise of all processes."""
    size = environ.get("LOCAL_WORLD_SIZE", "")
    return int(size) if size.isdecimal() and int(size) else launch.size


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that launchers set for their processes."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES) and name not in NAMES}
