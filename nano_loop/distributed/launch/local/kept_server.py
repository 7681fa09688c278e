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

from nano_loop.distributed.launch.local.server import Server
from nano_loop.distributed.launch.local.start import ALL_MODULES, Origin, cpus_of, modules_to_import
from nano_loop.distributed.launch.torch_version import is_older_than
from nano_loop.distributed.limits import limit_in_words
from nano_loop.distributed.seat import Seat
from nano_loop.errors import NanoWorkerError, problem

_IS_PYTHON = "every rank but the first is a Python process that nano_loop starts"
_HAS_NANO_LOOP = "Point sys.executable to a Python that has nano_loop"

#: Seconds without a run after which the process ends.
IDLE = 60.0

_kept: list[Server] = []  # one at the most


def server_for(seat: Seat) -> Server:
    """Return the process that forks the worker of a seat, and others like it: the kept one if it fits, or a new one."""
    origin = Origin.of_seat(seat)
    while _kept:
        kept = _kept.pop()
        if kept.owner != os.getpid():  # this process was forked, and the server is its parent's
            continue
        if kept.origin == origin and _is_there(kept):
            return kept
        kept.end()
    assert seat.ranks.folder is not None
    if not sys.executable:
        given = f"rank {seat.ranks.rank} could not be started: sys.executable is {sys.executable!r}"
        raise NanoWorkerError(problem(given, _IS_PYTHON, _HAS_NANO_LOOP), rank=seat.ranks.rank)
    try:
        return Server(origin, cpus_of(seat), str(seat.ranks.folder), IDLE, modules_to_import())
    except OSError as error:
        if limit_in_words(error, seat.ranks.folder):
            raise
        given = f"rank {seat.ranks.rank} could not be started with {sys.executable!r} ({error})"
        raise NanoWorkerError(problem(given, _IS_PYTHON, _HAS_NANO_LOOP), rank=seat.ranks.rank) from error


def _is_there(server: Server) -> bool:
    """Whether a server will fork workers: at once, or when it has imported what they need."""
    server.pump()
    return server.answers() if server.ready else not server.gone


def start_early(seat: Seat) -> None:
    """Start the process for a run that is to come, unless one is kept or it cannot be started.

    It then imports torch while the caller makes its model and reads its data. What keeps it from starting is for the
    run to report.
    """
    if _kept or not sys.executable or _torch_makes_a_folder():
        return
    with contextlib.suppress(OSError):
        _keep(Server(Origin.of_seat(seat), cpus_of(seat), None, IDLE, ALL_MODULES))


def _torch_makes_a_folder() -> bool:
    """Whether torch's import makes a temporary folder, as 2.8's does. It is to be in the folder of a run."""
    return is_older_than(2, 9)


def keep(server: Server) -> None:
    """Keep a server, which has no workers any more, for the next run."""
    server.pump()
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
