"""Faults: rank 0, which is the user's own process, raises or is interrupted."""

import contextlib
import signal
import sys
import threading
import time

from faults.fault import Fault
from faults.runs import LAST_STEP, at, collective, on, on_each, raising, run


class MineError(Exception):
    """An exception of the user."""


def _everywhere(make, *arguments):
    return lambda: run(lambda rank, step: raising(make, *arguments)())


def _interrupted_soon():
    main = threading.main_thread().ident
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()


def _interrupted_in_a_wait():
    def each_step(rank, step):
        if (rank, step) == (1, 3):
            time.sleep(60)
        if (rank, step) == (0, 3):
            _interrupted_soon()

    run(each_step)


def _caught():
    with contextlib.suppress(ValueError):
        raise ValueError


FAULTS = [
    Fault("rank 0 raises before its first step", at(0, 0, raising(MineError))),
    Fault("rank 0 raises between two steps", at(0, 3, raising(MineError, "mine")), quick=True),
    Fault("rank 0 raises before its last step", at(0, LAST_STEP, raising(MineError))),
    Fault("rank 0 raises after its last step", on(0, raising(MineError), lambda: time.sleep(60))),
    Fault("every rank raises the same", _everywhere(KeyError, "everywhere")),
    Fault("rank 0 raises an exception that the loop catches", at(0, 3, _caught)),
    Fault("a worker raises an exception that the loop catches", at(1, 3, _caught)),
    Fault(
        "rank 0 raises ConnectionResetError of the loop's own connection",
        at(0, 3, raising(ConnectionResetError, 104, "reset")),
        quick=True,
    ),
    Fault(
        "rank 0 raises BrokenPipeError of the loop's own pipe", at(0, 3, raising(BrokenPipeError, 32, "Broken pipe"))
    ),
    Fault("rank 0 raises MemoryError", at(0, 3, raising(MemoryError))),
    Fault("rank 0 calls sys.exit(3)", at(0, 3, lambda: sys.exit(3))),
    Fault("rank 0 calls sys.exit(0)", at(0, 3, lambda: sys.exit(0))),
    Fault("rank 0 calls sys.exit with words", at(0, 3, lambda: sys.exit("bye"))),
    Fault("every rank calls sys.exit", _everywhere(SystemExit, 4)),
    Fault("rank 0 raises KeyboardInterrupt", at(0, 3, raising(KeyboardInterrupt))),
    Fault("Ctrl-C while rank 0 waits for gradients", _interrupted_in_a_wait),
    Fault(
        "Ctrl-C while rank 0 waits in a collective of the loop",
        on(0, lambda: (_interrupted_soon(), collective()), lambda: time.sleep(60)),
        quick=True,
    ),
    Fault("Ctrl-C while rank 0 waits for a worker's end", on(0, _interrupted_soon, lambda: time.sleep(60))),
    Fault(
        "rank 0 raises and a worker raises later",
        on_each(lambda rank: (time.sleep(0.2 * rank), raising(MineError, f"rank {rank}")())),
    ),
]
