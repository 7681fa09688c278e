"""The rendezvous of an external launch: where its processes meet, and the text messages that they exchange there."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from nano_loop.distributed.comm.process_group_channel import ProcessGroupChannel
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.shared_folder import private_folder, refuse_foreign_folder, shared_memory_device
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.errors import NanoError, RankLateError, error_message

_INTERVAL = 0.01  # seconds between checks of a store, which may be on another host
#: A file that is newer than files from before the run, and older than files that ranks write in the run.
BEGAN = "began"

_Place = tuple[str, int]  # host and port

_stores: dict[_Place, Store] = {}  # servers must outlive the runs that use them
_runs: dict[_Place, int] = {}

#: Returns the texts of all ranks, in rank order, once all ranks have passed theirs.
Gather = Callable[[str], list[str]]


def external_store(launch: Launch, environ: Mapping[str, str], timeout: float) -> Store:
    """Return a store for all ranks of a launch, new for each run; raise a `NanoError` if its place is not known."""
    place = _meeting_place(launch, environ)
    # torchrun's agent runs the server; otherwise rank 0 does.
    serves = launch.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if place not in _stores:
        waiting = timedelta(seconds=timeout)
        _stores[place] = TCPStore(*place, is_master=serves, timeout=waiting, wait_for_workers=False)
    _runs[place] = _runs.get(place, 0) + 1
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"nano_loop/{attempt}/{_runs[place]}", _stores[place])


def _meeting_place(launch: Launch, environ: Mapping[str, str]) -> _Place:
    # The variables of OpenMPI, and of MPICH and Intel MPI.
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
    """Return the first host of the step, and a port that other steps and jobs are unlikely to use."""
    from nano_loop.integrations.fabric import SLURMEnvironment  # only for srun: the import takes seconds

    # A step may use only some of the job's nodes. Fabric's own method requires --ntasks-per-node.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = 7 * int(job if job.isdecimal() else 0) + int(step if step.isdecimal() else 0)
    return SLURMEnvironment.resolve_root_node_address(nodes), 15000 + number % 10000


def this_host() -> str:
    """Return the identity of this host, or of a container with its own shared memory or process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        boot, numbers = "", 0
    return f"{socket.gethostname()} {boot} {shared_memory_device()} {numbers}"


def gather_at(store: Store, ranks: Ranks) -> Gather:
    """Return a function that exchanges texts through a store that no other run uses; waits call `Ranks.check`."""
    rounds = itertools.count()

    def gather(text: str) -> list[str]:
        number = next(rounds)
        keys = [f"{number}/{rank}" for rank in range(ranks.size)]
        store.set(keys[ranks.rank], text)
        deadline = time.monotonic() + ranks.timeout
        for rank, key in enumerate(keys):
            while not store.check([key]):
                ranks.check()
                if time.monotonic() > deadline:
                    raise RankLateError(ranks.late_message(f"rank {rank}", "join the run"), rank)
                time.sleep(_INTERVAL)
        return [store.get(key).decode(errors="replace") for key in keys]

    return gather


def gather_in_group(ranks: Ranks) -> Gather:
    """Return a function that exchanges texts in the user's existing process group."""
    channel = ProcessGroupChannel(ranks)
    return lambda text: [data.decode(errors="replace") for data in channel.exchange(text.encode(), "gather")]


@contextmanager
def common_folder(rank: int, gather: Gather, here: list[int], own: Path | None = None) -> Iterator[Path]:
    """Yield the private folder of the first of the ranks `here` to all: its `own`, or a new one. Collective."""
    with private_folder() if rank == here[0] and own is None else nullcontext(own) as made:
        if rank == here[0] and made is not None:
            (made / BEGAN).touch()
        folder = Path(gather(str(made))[here[0]])
        refuse_foreign_folder(folder)
        yield folder
