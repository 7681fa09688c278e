"""What it takes to start a worker process, and the program that it begins with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from nano_loop.distributed.launch.external.environment import without_launch
from nano_loop.distributed.seat import Seat

# Runs before torch is imported, and so before a thread exists that would keep another mask. Nothing of what imports
# make is garbage: to look for it takes a fifth of the start. Of the working folder, which -c puts first on the path, a
# json.py would be taken for Python's own. torch 2.8 makes a temporary folder when it is imported, which a killed worker
# would leave behind: in the run's own folder it goes with that.
BOOTSTRAP = """
import sys
sys.path[:] = filter(None, sys.path)
import gc, json, os, pathlib, tempfile
gc.disable()
start = json.loads(sys.stdin.buffer.readline())
if start["cpus"]:
    os.sched_setaffinity(0, start["cpus"])
sys.path[:], sys.argv[:] = start["path"], start["argv"]
tempfile.tempdir = start["folder"]
from nano_loop.distributed.launch.local.worker import main
tempfile.tempdir = None
main(pathlib.Path(start["folder"]), start["rank"], start["report"])
"""
# They would put every process on the same CPUs, or stop a worker at a prompt.
_NOT_FOR_WORKERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "PYTHONINSPECT")
_FLAGS = (
    ("optimize", "-O"),  # else an assert would fail on one rank alone
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("bytes_warning", "-b"),
)


@dataclass
class Start:
    """What it takes to start a worker.

    Parameters
    ----------
    rank : int
        Its rank.
    cpus : list of int
        The logical CPUs that it is bound to; empty for no binding.
    folder : str
        The folder that the ranks of the run have in common.
    path, argv : list of str
        ``sys.path`` and ``sys.argv`` of the caller.
    environ : dict
        Its environment.
    verbose : bool
        Whether what it prints is shown.
    """

    rank: int
    cpus: list[int]
    folder: str
    path: list[str]
    argv: list[str]
    environ: dict[str, str]
    verbose: bool

    @classmethod
    def of_seat(cls, seat: Seat, verbose: bool) -> Start:
        """Return what starts the worker of a seat, from the caller's process as it is now."""
        ranks = seat.ranks
        return cls(
            rank=ranks.rank,
            cpus=list(ranks.shares[ranks.local_rank]) if ranks.shares else [],
            folder=str(ranks.folder),
            path=[os.path.abspath(each) for each in sys.path],
            argv=sys.argv,
            environ=environment_of(seat, os.environ),
            verbose=verbose,
        )

    def as_line(self, report: int) -> bytes:
        """Return what the bootstrap reads, with the file descriptor to which the worker reports."""
        names = ("rank", "cpus", "folder", "path", "argv")
        return json.dumps({name: getattr(self, name) for name in names} | {"report": report}).encode() + b"\n"


def environment_of(seat: Seat, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a seat's worker, where the caller has `environ`."""
    kept = {name: value for name, value in without_launch(environ).items() if name not in _NOT_FOR_WORKERS}
    defaults = {"OMP_NUM_THREADS": str(seat.machine.num_threads), "TQDM_DISABLE": "1", "PYTHONBREAKPOINT": "0"}
    return {**defaults, **kept}


def command() -> list[str]:
    """Return the command line of a worker: this Python with this process's options, and the bootstrap."""
    flags = [option for name, option in _FLAGS for _ in range(getattr(sys.flags, name))]
    settings = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    return [sys.executable, *flags, *settings, *(f"-W{each}" for each in sys.warnoptions), "-c", BOOTSTRAP]
