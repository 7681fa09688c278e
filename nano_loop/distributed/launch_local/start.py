"""The settings that worker processes start with: those of the Python that they are forked from, and of each of them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

from nano_loop.config.exports import is_exported
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.folder import working_folder
from nano_loop.distributed.launch_external.environment import without_launch

#: Variables that would put every process on the same CPUs, or stop a worker at a prompt.
NOT_FOR_WORKERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "PYTHONINSPECT")
# They change from call to call, and nothing that Python or a library does when it starts depends on them.
# torch._dynamo sets the last when it is imported, and reads it when it compiles.
_VOLATILE = ("PYTEST_CURRENT_TEST", "OLDPWD", "PWD", "SHLVL", "_", "TORCHINDUCTOR_CACHE_DIR")
_THREADS = "OMP_NUM_THREADS"
_FLAGS = (
    ("optimize", "-O"),  # else an assert would fail on one rank alone
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("bytes_warning", "-b"),
)


def origin_of(slot: RankSlot) -> dict[str, Any]:
    """Return what the process is started with that workers are forked from; another origin takes another process.

    Its command line and environment (but for what changes from call to call), the path of its imports, how many CPUs
    each worker is bound to (OpenMP counts them when it is loaded), and the limits that it inherits.
    """
    environ = {name: value for name, value in environment_of(slot, os.environ).items() if name not in _VOLATILE}
    return {
        "command": command(),
        "environ": environ,
        "path": _path(),
        "cpus": len(cpus_of(slot)),
        "limits": _limits(),
    }


def start_of(slot: RankSlot) -> dict[str, Any]:
    """Return what a slot's worker takes over from the caller's process when it is forked."""
    return {
        "rank": slot.ranks.rank,
        "cpus": cpus_of(slot),
        "folder": str(slot.ranks.folder),
        "argv": [*map(str, sys.argv)],
        "script": getattr(sys.modules["__main__"], "__file__", None),
        "environ": environment_of(slot, os.environ),
        "working_folder": working_folder(),
    }


def environment_of(slot: RankSlot, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a slot's worker, where the caller has `environ`."""
    kept = {name: value for name, value in without_launch(environ).items() if name not in NOT_FOR_WORKERS}
    if is_exported(_THREADS, environ):  # by `nano-loop env`, for the cores of all ranks together
        del kept[_THREADS]
    defaults = {_THREADS: str(slot.machine.num_threads), "TQDM_DISABLE": "1", "PYTHONBREAKPOINT": "0"}
    return {**defaults, **kept}


def command() -> list[str]:
    """Return the command line of this Python with this process's options."""
    flags = [option for name, option in _FLAGS for _ in range(getattr(sys.flags, name))]
    settings = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    return [sys.executable, *flags, *settings, *(f"-W{option}" for option in sys.warnoptions)]


def cpus_of(slot: RankSlot) -> list[int]:
    """Return the CPUs that a slot's worker is bound to; empty for no binding."""
    return list(slot.ranks.shares[slot.ranks.local_rank]) if slot.ranks.shares else []


def _path() -> list[str]:
    # Python skips an entry that is no string, and one in a working folder that is gone.
    entries: list[object] = [*sys.path]
    has_folder = working_folder() is not None
    usable = (entry for entry in entries if isinstance(entry, str) and (has_folder or os.path.isabs(entry)))
    return [*map(os.path.abspath, usable)]


def _limits() -> tuple[object, ...]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return tuple(resource.getrlimit(getattr(resource, name)) for name in names)
