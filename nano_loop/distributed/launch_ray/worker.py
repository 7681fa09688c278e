"""An actor as a rank of one run: it reads its payload, joins the other ranks, and returns how its task has failed.

Ray calls the methods of `RankWorker` one after another, in the main thread of a process for this rank alone.
"""

from __future__ import annotations

import gc
import os
import platform
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nano_loop.config.options import Options
from nano_loop.cpu import Machine, read_machine
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.folder import place_of, workers_files
from nano_loop.distributed.files.private_files import guard_files, redirect_files
from nano_loop.distributed.launch.assignment import PAYLOAD, WORKER_INIT, State
from nano_loop.distributed.launch.failure import Failure, flush_output, pickled, raised
from nano_loop.distributed.launch.running import run_joined
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.task import Task
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.distributed.launch_external.launcher import Terms, join_run
from nano_loop.distributed.launch_local.worker import keep_sockets_in
from nano_loop.distributed.launch_local.worker_warnings import sent
from nano_loop.distributed.launch_ray.rank_connections import ConnectionToRank0
from nano_loop.distributed.payload.payload import load
from nano_loop.integrations.fabric.rank_zero import note_rank
from nano_loop.version import __version__

# It waits for the end of the process that holds the pipe. Ray kills the children of an actor, so it is no child: the
# first shell ends at once.
_WAIT_AND_DELETE = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$@") >/dev/null 2>&1 &'
_SHARED = (
    "Put files that all ranks read where all nodes see them under the same path, such as NFS; what rank 0 writes lies "
    "on its node"
)


@dataclass
class Call:
    """What an actor is to do, as it comes in the payload.

    Parameters
    ----------
    task : Task
        What every rank does.
    options : Options
        The options of the run.
    state : State
        torch's settings, and the random states.
    """

    task: Task
    options: Options
    state: State


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
        note_rank(self._rank)
        _take_over(setting)
        self._payload = Path(setting["payload"])
        self._callers_folders = [self._payload]
        self._connection = ConnectionToRank0(setting["place"], self._rank, setting["token"], self._end)
        if not setting["verbose"]:
            sent(self._connection.send)
        self._open = ExitStack()
        self._folder = self._open.enter_context(private_folder())
        self._open.enter_context(workers_files(self._folder))
        keep_sockets_in(self._folder)
        self._pipe = _deleted_with_this_process(str(self._folder), place_of(self._folder))
        self._call: Call | None = None

    def place(self) -> dict[str, Any]:
        """Return with what versions this is, and whether it sees the caller's payload."""
        return {"versions": versions(), "sees": self._payload.is_dir()}

    def write(self, name: str, content: Any) -> str:
        """Write a file of the payload for the ranks of this node, uint8, and return the folder."""
        folder = self._folder / "sent"
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        with path.open("wb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
        return str(folder)

    def load(self, folder: str) -> Failure | None:
        """Read the payload in a folder of this node; return how that has failed, if it has."""
        where = ""
        try:
            redirect_files(self._folder, self._rank, made=self._payload)
            if (Path(folder) / WORKER_INIT).exists():
                where = " in worker_init"
                load(Path(folder) / WORKER_INIT)()
            where = " while it read the arguments of the call"
            self._call = load(Path(folder) / PAYLOAD)
            guard_files()
        except BaseException as error:
            return self._failure(error, where)
        gc.freeze()  # what has been imported stays; the garbage collector need not go through it again and again
        return None

    def forget(self) -> None:
        """Delete the payload: all ranks of the node have read it."""
        shutil.rmtree(self._folder / "sent", ignore_errors=True)

    def run(self, host: str, port: int, address: str, share: tuple[int, int] | None) -> Failure | None:
        """Join the other ranks at a store and do the task; return how that has failed, if it has.

        Parameters
        ----------
        host, port : str and int
            Where the store is.
        address : str
            This node's address.
        share : (int, int) or None
            See `threads_for`.
        """
        call = self._call
        assert call is not None
        if self._setting["threads_are_chosen"] or call.state.threads is not None:
            # By this variable the step for threads knows a process of Ray, whose OMP_NUM_THREADS nobody has chosen.
            os.environ.pop("RAY_RAYLET_PID", None)
        machine = read_machine()
        threads, waiting = threads_for(machine, share), timedelta(seconds=call.options.timeout)
        secret = self._setting["secret"]
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=waiting)
            terms = Terms(address=address, secret=secret, threads=threads, watched=True, parent=self._folder)
            size = call.options.num_processes or 1
            joined = join_run(store, call.options, machine, Launch("ray", self._rank, size), terms)
            most = threads or machine.num_threads
            run_joined(call.task, call.state, most, self._noting(joined), size, self._folder)
        except BaseException as error:
            return self._failure(error, "")
        flush_output()
        return None

    @contextmanager
    def _noting(self, joined: AbstractContextManager[RankSlot]) -> Iterator[RankSlot]:
        with joined as slot:
            self._callers_folders += [slot.ranks.folder] if slot.ranks.folder else []
            yield slot

    def _end(self) -> None:
        """End the process, as rank 0's has ended, and what that has left on this host."""
        for folder in self._callers_folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _failure(self, error: BaseException, where: str) -> Failure:
        # torch's handler raises where a loader's process has died, also in the midst of the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        failure = raised(self._rank, error, traceback.format_exc(), where)
        failure.pickled = pickled(error)
        if isinstance(error, FileNotFoundError):
            failure.advice = _SHARED
        flush_output()
        return failure


def _take_over(setting: dict[str, Any]) -> None:
    """Take over the caller's arguments and working folder, where that is here too; silence standard output."""
    sys.argv = setting["argv"]
    if setting["cwd"] and os.path.isdir(setting["cwd"]):
        os.chdir(setting["cwd"])
    if not setting["verbose"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def _deleted_with_this_process(*folders: str) -> object:
    """Have folders deleted when this process ends, however it ends; what is returned has to live as long."""
    command = ["/bin/sh", "-c", _WAIT_AND_DELETE, "sh", *folders, *(f"{folder}.gone" for folder in folders)]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    shell.wait()
    return shell.stdin
