"""An actor that is a rank of one run: it reads the payload, joins the other ranks, and returns its failure, if any.

Ray calls the methods of `RankWorker` in sequence, in the main thread of a process for this rank only.
"""

from __future__ import annotations

import itertools
import os
import pickle
import platform
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from nano_loop.cpu import Machine, read_machine
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.folder import cache_folders_made, discard, place_of, workers_files
from nano_loop.distributed.launch.failure import Failure, Kind
from nano_loop.distributed.launch.shared_folder import private_folder
from nano_loop.distributed.launch.stream import Reporter
from nano_loop.distributed.launch.worker import Assignment, work
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.distributed.launch_external.launcher import join_run
from nano_loop.version import __version__

#: Keys of the store: whether a rank has read its payload; rank 0's requests for stack dumps, and the replies.
READY, ASKED, STACK = "ready/{}", "asked/{}/{}", "stack/{}/{}"
_COPY = "payload/{}"  # the folder that a rank has written for the ranks on its node
_LONGEST_WAIT = timedelta(days=24)  # in milliseconds, limited by the system's `poll`

# It waits for the end of the process that holds the pipe. Ray kills an actor's children, so it must not be a child: the
# first shell ends immediately. Once a folder has been renamed, its path cannot be used to add files.
_WAIT_AND_DELETE = """
exec 3<&0
(
    cat <&3
    while [ "$1" != -- ]; do mv -- "$1" "$1.gone"; rm -rf -- "$1.gone"; shift; done
    for folder; do rmdir -- "$folder"; done
) >/dev/null 2>&1 &
"""


def threads_for(machine: Machine, share: tuple[int, int] | None) -> int | None:
    """Return a rank's threads by Ray's CPUs of rank and node, maybe hardware threads; None if ranks divide the node."""
    if share is None:
        return None
    own, of_node = share
    return max(1, min(own, own * machine.num_threads // max(of_node, 1)))


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    return {"Python": platform.python_version(), "torch": torch.__version__, "nano_loop": __version__}


class RankWorker:
    """A process that is a rank of one run.

    `setting` has plain values sent by `nano_loop.distributed.launch_ray.launcher`, such as the ``payload``'s folder on
    the caller's node, and the ``writer``, the rank that copies it to this node.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        self._setting = setting
        self._open = ExitStack()
        self._folder = self._open.enter_context(private_folder())
        self._open.enter_context(workers_files(self._folder))
        caches = self._open.enter_context(cache_folders_made())
        own = (self._folder, place_of(self._folder))
        self._open.enter_context(deleted_with_this_process(*own, if_empty=caches[::-1]))
        self._copy = self._folder / "sent"
        self._copy.mkdir(mode=0o700)  # private whatever the umask, because its contents are trusted

    def write(self, name: str, content: Any) -> None:
        """Write a uint8 array to a file of the payload for the ranks of this node."""
        path = self._copy / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)

    def run(self) -> Failure | None:
        """Read the payload, join the other ranks, and do the task; return its failure, if any."""
        setting, rank = self._setting, self._setting["rank"]
        for name, version in versions().items():
            if setting["versions"][name] != version:
                what = f"has {name} {version}, but the caller has {setting['versions'][name]}"
                return Failure(rank, Kind.CAUSE, what, "Give every node the same Python environment")
        _take_over(setting)
        store, other = meeting_at(*setting["store"]), meeting_at(*setting["store"])
        answering = (other, rank, threading.get_ident())
        threading.Thread(target=_say_where, args=answering, name="nano_loop answers", daemon=True).start()
        payload, writer = setting["payload"], setting["writer"]
        if writer == rank:
            store.set(_COPY.format(rank), str(self._copy))
        own = payload if writer is None else store.get(_COPY.format(writer)).decode()

        @contextmanager
        def join(assignment: Assignment, rank: int) -> Iterator[RankSlot]:
            machine = read_machine()
            if setting["threads_are_chosen"] or assignment.state.threads is not None:
                # The thread setup would treat OMP_NUM_THREADS as set by Ray if it saw this variable.
                os.environ.pop("RAY_RAYLET_PID", None)
            with join_run(
                store,
                assignment.options,
                machine,
                Launch("ray", rank, assignment.size),
                address=setting["address"],
                threads=threads_for(machine, setting["share"]),
                folder=self._folder,
            ) as slot:
                discard(self._copy)  # all ranks have joined, so all have read it
                yield slot

        reports: dict[str, bytes] = {}

        def take(kind: str, content: bytes, **header: Any) -> None:
            reports[kind] = content
            if kind == "ready":
                store.set(READY.format(rank), "")

        work(Reporter(rank, take), self._folder, join, payload=Path(own))
        return pickle.loads(reports["failed"]) if "failed" in reports else None


def meeting_at(host: str, port: int, timeout: float, *, is_master: bool = False) -> TCPStore:
    """Return a connection to the store where the ranks meet. It handles one call at a time, including waits."""
    waiting = timedelta(seconds=timeout)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=waiting)


def _say_where(store: Store, rank: int, thread: int) -> None:
    """Report the Python stack of a thread on each request by rank 0, until the store is gone."""
    with suppress(RuntimeError):
        for number in itertools.count(1):
            store.wait([ASKED.format(rank, number)], _LONGEST_WAIT)
            frame = sys._current_frames().get(thread)
            store.set(STACK.format(rank, number), "".join(traceback.format_stack(frame)) if frame is not None else "")


def _take_over(setting: dict[str, Any]) -> None:
    """Apply the caller's arguments and working folder, if it exists here; silence standard output."""
    sys.argv = setting["argv"]
    if setting["cwd"] and os.path.isdir(setting["cwd"]):
        os.chdir(setting["cwd"])
    if not setting["verbose"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


@contextmanager
def deleted_with_this_process(*folders: str | Path, if_empty: Sequence[str] = ()) -> Iterator[None]:
    """Delete folders on exit, or when this process ends for any reason; then also empty folders in `if_empty`."""
    command = ["/bin/sh", "-c", _WAIT_AND_DELETE, "sh", *map(str, folders), "--", *if_empty]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    shell.wait()
    assert shell.stdin is not None  # because of stdin=PIPE
    with shell.stdin:
        yield
        for folder in folders:
            discard(folder)
