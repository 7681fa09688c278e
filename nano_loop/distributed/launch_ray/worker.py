"""An actor as a rank of one run: it reads its payload, joins the other ranks, and reports how its task has ended.

Ray calls the methods of `RankWorker` one after another, in the main thread of a process for this rank alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nano_loop.cpu import Machine, read_machine
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.caches import cache_folders_made
from nano_loop.distributed.files.folder import discard, place_of, workers_files
from nano_loop.distributed.launch.assignment import Assignment
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.worker import work
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.distributed.launch_external.launcher import Terms, join_run
from nano_loop.distributed.launch_ray.rank_connections import ConnectionToRank0
from nano_loop.version import __version__

# It waits for the end of the process that holds the pipe. Ray kills the children of an actor, so it is no child: the
# first shell ends at once. Once a folder has another name, nothing can be put into it by its path.
_WAIT_AND_DELETE = """
exec 3<&0
(cat <&3; for folder; do mv -- "$folder" "$folder.gone"; rm -rf -- "$folder.gone"; done) >/dev/null 2>&1 &
"""


def threads_for(machine: Machine, share: tuple[int, int] | None) -> int | None:
    """Return the compute threads of a rank; None where the ranks of a node divide it.

    Parameters
    ----------
    machine : Machine
        What the process may use.
    share : (int, int) or None
        The CPUs of the rank and those of its node, as Ray counts them, which may be threads of cores.
    """
    if share is None:
        return None
    own, of_node = share
    return max(1, min(own, own * machine.num_threads // max(of_node, 1)))


def versions() -> dict[str, str]:
    """Return the versions that have to be the same on all nodes."""
    return {"Python": platform.python_version(), "torch": torch.__version__, "nano_loop": __version__}


class RankWorker:
    """A process as a rank of one run.

    Parameters
    ----------
    setting : dict
        What `nano_loop.distributed.launch_ray.starting` has sent: plain values, and this class.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        self._setting = setting
        self._rank: int = setting["rank"]
        _take_over(setting)
        self._payload = Path(setting["payload"])
        place, token = setting["place"], setting["token"]
        self._connection = ConnectionToRank0(place, self._rank, token, self._forget, end=lambda: os._exit(0))
        self._open = ExitStack()
        self._folder = self._open.enter_context(private_folder())
        self._open.enter_context(workers_files(self._folder))
        self._open.enter_context(cache_folders_made())
        self._open.enter_context(deleted_with_this_process(self._folder, place_of(self._folder)))

    def place(self) -> dict[str, Any]:
        """Return with what versions this is, and whether it sees the caller's payload."""
        return {"versions": versions(), "sees": self._payload.is_dir()}

    def write(self, name: str, content: Any) -> str:
        """Write a file of the payload for the ranks of this node, uint8, and return the folder."""
        folder = self._folder / "sent"
        path = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)  # closed to others whatever the umask, as what is in it is trusted
        path.parent.mkdir(exist_ok=True, parents=True)
        with path.open("wb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
        return str(folder)

    def run(self, payload: str, host: str, port: int, address: str, share: tuple[int, int] | None) -> None:
        """Read the payload, join the other ranks at a store, and do the task; how that has ended is reported.

        Parameters
        ----------
        payload : str
            The folder of the payload, on this node.
        host, port : str and int
            Where the store is.
        address : str
            This node's address.
        share : (int, int) or None
            See `threads_for`.
        """

        @contextmanager
        def join(assignment: Assignment, rank: int) -> Iterator[RankSlot]:
            options, machine = assignment.options, read_machine()
            if self._setting["threads_are_chosen"] or assignment.state.threads is not None:
                # By this variable the step for threads knows a process of Ray, whose OMP_NUM_THREADS nobody has chosen.
                os.environ.pop("RAY_RAYLET_PID", None)
            waiting = timedelta(seconds=options.timeout)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=waiting)
            threads = threads_for(machine, share)
            terms = Terms(address=address, threads=threads, watched=True, parent=self._folder)
            with join_run(store, options, machine, Launch("ray", rank, assignment.size), terms) as slot:
                yield slot

        verbose = self._setting["verbose"]
        work(self._connection, self._folder, join, payload=Path(payload), verbose=verbose)

    def _forget(self) -> None:
        shutil.rmtree(self._folder / "sent", ignore_errors=True)


def _take_over(setting: dict[str, Any]) -> None:
    """Take over the caller's arguments and working folder, where that is here too; silence standard output."""
    sys.argv = setting["argv"]
    if setting["cwd"] and os.path.isdir(setting["cwd"]):
        os.chdir(setting["cwd"])
    if not setting["verbose"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


@contextmanager
def deleted_with_this_process(*folders: str | Path) -> Iterator[None]:
    """Have folders deleted on leaving, or when this process ends, however it ends."""
    command = ["/bin/sh", "-c", _WAIT_AND_DELETE, "sh", *map(str, folders)]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    shell.wait()
    assert shell.stdin is not None  # it was asked for
    with shell.stdin:
        yield
        for folder in folders:
            discard(folder)
