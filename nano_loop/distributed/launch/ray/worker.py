"""What an actor does: it reads its payload, joins the other ranks, does the task, and returns how that ended.

Ray calls the methods of `RankWorker` one after another, in the main thread of a process for this rank alone.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nano_loop.cpu import read_machine
from nano_loop.distributed.files.private_files import redirect_files
from nano_loop.distributed.launch.external.environment import Launch
from nano_loop.distributed.launch.external.launcher import Terms, join_run
from nano_loop.distributed.launch.failure import flush_output, pickled, raised
from nano_loop.distributed.launch.local.warned import sent
from nano_loop.distributed.launch.ray.call import PAYLOAD, WORKER_INIT, Call, threads_for, versions
from nano_loop.distributed.launch.ray.folder import NodeFolder
from nano_loop.distributed.launch.ray.lifeline import Lifeline
from nano_loop.distributed.launch.running import run_joined
from nano_loop.distributed.payload.payload import load
from nano_loop.distributed.seat import Seat
from nano_loop.rank_zero import note_rank


class RankWorker:
    """A process as a rank of one run.

    Parameters
    ----------
    setting : dict
        What `nano_loop.distributed.launch.ray.launcher` has sent: plain values.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        self._rank: int = setting["rank"]
        self._secret: bytes = setting["secret"]
        self._threads_are_chosen: bool = setting["threads_are_chosen"]
        note_rank(self._rank)
        _become(setting)
        self._payload = Path(setting["payload"])
        self._callers_folders = [self._payload]
        self._lifeline = Lifeline(tuple(setting["lifeline"]), self._rank, setting["token"], self._end)
        if not setting["verbose"]:
            sent(self._lifeline.send)
        self._folder = NodeFolder()
        self._call: Call | None = None

    def place(self) -> dict[str, Any]:
        """Return where this is, and with what versions."""
        return {"versions": versions(), "host": socket.gethostname(), "sees": self._payload.is_dir()}

    def folder(self) -> str:
        """Make a folder for the payload, which the ranks of this node read, and return it."""
        self._payload = self._folder.path / "sent"
        self._payload.mkdir()
        return str(self._payload)

    def write(self, name: str, content: Any) -> None:
        """Write a file of the payload: uint8, and the name below the folder."""
        path = self._payload / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]

    def load(self, folder: str) -> dict[str, Any] | None:
        """Read the payload in a folder of this node; return how that has failed, if it has."""
        where = ""
        try:
            redirect_files(self._folder.path, self._rank)
            if (Path(folder) / WORKER_INIT).exists():
                where = " in worker_init"
                load(Path(folder) / WORKER_INIT)()
            where = " while it read the arguments of the call"
            self._call = load(Path(folder) / PAYLOAD)
        except BaseException as error:
            return self._failed(error, where)
        gc.freeze()  # what has been imported stays; the garbage collector need not go through it again and again
        return None

    def forget(self) -> None:
        """Delete the payload: all ranks of the node have read it."""
        self._folder.clear("sent")

    def run(self, host: str, port: int, address: str, share: tuple[int, int] | None) -> dict[str, Any] | None:
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
        if self._threads_are_chosen or call.state.threads is not None:
            # By this variable the step for threads knows a process of Ray, whose OMP_NUM_THREADS nobody has chosen.
            os.environ.pop("RAY_RAYLET_PID", None)
        machine = read_machine()
        threads = threads_for(machine, share)
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=call.waiting)
            launch = Launch("ray", self._rank, call.size)
            terms = Terms(address=address, secret=self._secret, threads=threads, watched=True, parent=self._folder.path)
            seat = join_run(store, call.options, machine, launch, terms)
            noting = self._noting(seat)
            run_joined(call.task, call.state, threads or machine.num_threads, noting, call.size, self._folder.path)
        except BaseException as error:
            return self._failed(error, "")
        flush_output()
        return None

    @contextmanager
    def _noting(self, joined: AbstractContextManager[Seat]) -> Iterator[Seat]:
        with joined as seat:
            self._callers_folders += [seat.ranks.folder] if seat.ranks.folder else []
            yield seat

    def _end(self) -> None:
        """End the process, as rank 0's has ended, and what that has left on this host."""
        for each in self._callers_folders:
            shutil.rmtree(each, ignore_errors=True)
        os._exit(0)

    def _failed(self, error: BaseException, where: str) -> dict[str, Any]:
        # torch's handler raises where a loader's process has died, also in the midst of the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        failure = raised(self._rank, error, traceback.format_exc(), where)
        if isinstance(error, FileNotFoundError):
            failure.advice = _SHARED
        flush_output()
        return {"failure": failure.in_words(), "exception": pickled(error)}


_SHARED = (
    "Put files that all ranks read where all nodes see them under the same path, such as NFS; what rank 0 writes lies "
    "on its node"
)


def _become(setting: dict[str, Any]) -> None:
    """Take over the caller's arguments and working folder, where that is here too; silence standard output."""
    sys.argv = setting["argv"]
    if setting["cwd"] and os.path.isdir(setting["cwd"]):
        os.chdir(setting["cwd"])
    if not setting["verbose"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
