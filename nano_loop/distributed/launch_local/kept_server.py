"""Keeps the process that workers are forked from for the next run.

It is started by the first run, or before it by a script that is going to need it. Starting Python and importing torch
takes seconds; forking takes milliseconds. The kept process uses no CPU, and ends by itself after a minute without a
run, with the caller, or when a run needs another environment.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from nano_loop.distributed.comm.rank_slot import RankSlot
from nano_loop.distributed.comm.system_limits import limit_in_words
from nano_loop.distributed.launch_local.server import Server
from nano_loop.distributed.launch_local.start import cpus_of, origin_of
from nano_loop.errors import NanoWorkerError, error_message
from nano_loop.patching.torch_private_compiler import COMPILER_PACKAGE
from nano_loop.patching.torch_versions import is_older_than

_IS_PYTHON = "every rank but the first is a Python process that nano_loop starts"
_HAS_NANO_LOOP = "Point sys.executable to a Python that has nano_loop"

_TASKS = tuple(f"nano_loop.{room}" for room in ("api", "integrations.lightning"))  # which the rooms below do not import
#: Seconds without a run after which the process ends.
IDLE = 60.0

_kept: list[Server] = []  # one at the most


def server_for(slot: RankSlot) -> Server:
    """Return the process that forks the worker of a slot, and others like it: the kept one if it fits, or a new one.

    Parameters
    ----------
    slot : RankSlot
        The place of one of the workers.
    """
    folder = slot.ranks.folder
    assert folder is not None
    origin = origin_of(slot)
    while _kept:
        kept = _kept.pop()
        if kept.owner != os.getpid():
            kept.forget()
            continue
        if kept.origin == origin and _is_there(kept):
            return kept
        kept.end()
    reason = f"rank {slot.ranks.rank} could not be started"
    if not sys.executable:
        message = error_message(f"{reason}: sys.executable is {sys.executable!r}", _IS_PYTHON, _HAS_NANO_LOOP)
        raise NanoWorkerError(message, rank=slot.ranks.rank)
    try:
        return Server(origin, cpus_of(slot), str(folder), IDLE, _imported())
    except OSError as error:
        if limit_in_words(error, folder):
            raise
        message = error_message(f"{reason} with {sys.executable!r} ({error})", _IS_PYTHON, _HAS_NANO_LOOP)
        raise NanoWorkerError(message, rank=slot.ranks.rank) from error


def _imported() -> list[str]:
    """Return what this process has of the modules of tasks, and of what an optimizer imports, which takes a second."""
    return [name for name in [*sys.modules] if name.startswith(_TASKS) or name == COMPILER_PACKAGE]


def _is_there(server: Server) -> bool:
    """Whether a server will fork workers: at once, or when it has imported what they need."""
    server.read_replies()
    return server.answers() if server.ready else not server.gone


def start_early(slot: RankSlot) -> None:
    """Start the process for a run that is to come, unless one is kept or it cannot be started.

    It then imports torch while the caller makes its model and reads its data. What keeps it from starting is for the
    run to report.
    """
    if _kept or not sys.executable or _torch_makes_a_folder():
        return
    with contextlib.suppress(OSError):
        _keep(Server(origin_of(slot), cpus_of(slot), None, IDLE, [*_imported(), COMPILER_PACKAGE]))


def _torch_makes_a_folder() -> bool:
    """Whether torch's import makes a temporary folder, as 2.8's does. It is to be in the folder of a run."""
    return is_older_than(2, 9)


def keep(server: Server) -> None:
    """Keep a server, which has no workers any more, for the next run."""
    server.read_replies()
    if server.ready and not server.gone and not _kept:
        _keep(server)
    else:
        server.end()


def _keep(server: Server) -> None:
    _kept.append(server)
    atexit.unregister(_end_at_exit)
    atexit.register(_end_at_exit)


def kept() -> list[Server]:
    """Return the processes that are kept: one, or none."""
    return [*_kept]


def end_kept() -> None:
    """End the process that is kept, if there is one."""
    while _kept:
        _kept.pop().end()


def _end_at_exit() -> None:
    """Close the connection before Python warns that nobody did, with ``-X dev``."""
    if _kept and _kept[0].owner == os.getpid():
        end_kept()
    elif _kept:
        _kept.pop().forget()
