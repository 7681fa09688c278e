"""The start settings of worker processes: those of the Python that they are forked from, and of each worker."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

from nano_loop.config.environment import is_exported
from nano_loop.cpu.partition import BINDING_VARIABLES
from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.files.folder import working_folder
from nano_loop.distributed.launch_external.environment import without_launch

#: Variables that would bind every process to the same CPUs, or make a worker wait at a prompt.
NOT_FOR_WORKERS = (*BINDING_VARIABLES, "PYTHONINSPECT")
# They change between calls without affecting how Python or a library starts. torch._dynamo sets the last one on import,
# and reads it for each compilation.
_VOLATILE = ("PYTEST_CURRENT_TEST", "OLDPWD", "PWD", "SHLVL", "_", "TORCHINDUCTOR_CACHE_DIR")
_THREADS = "OMP_NUM_THREADS"
_FLAGS = (
    ("optimize", "-O"),  # otherwise an assert could fail on one rank only
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("bytes_warning", "-b"),
)


def origin_of(slot: RankSlot) -> dict[str, Any]:
    """Return the start settings of the process that workers are forked from; different settings need a new process."""
    environ = {name: value for name, value in environment_of(slot, os.environ).items() if name not in _VOLATILE}
    return {"command": command(), "environ": environ, "path": _path(), "cpus": len(cpus_of(slot)), "limits": _limits()}


def start_of(slot: RankSlot) -> dict[str, Any]:
    """Return the settings that a slot's worker copies from the caller's process after the fork."""
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
    """Return the environment of a slot's worker, given the caller's `environ`."""
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
    """Return the CPUs that a slot's worker is bound to; empty if it is not bound."""
    return list(slot.ranks.shares[slot.ranks.local_rank]) if slot.ranks.shares else []


def _path() -> list[str]:
    # Python skips entries that are not strings, and those in a deleted working folder.
    entries: list[object] = [*sys.path]
    has_folder = working_folder() is not None
    usable = (entry for entry in entries if isinstance(entry, str) and (has_folder or os.path.isabs(entry)))
    return [*map(os.path.abspath, usable)]


def _limits() -> tuple[object, ...]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return tuple(resource.getrlimit(getattr(resource, name)) for name in names)
