"""Faults: a worker's process exits, is killed or hangs."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

from faults.fault import Fault
from faults.runs import LAST_STEP, at, collective, line_from, on

_SIGNALS = ("SEGV", "ABRT", "BUS", "FPE", "ILL", "TRAP", "SYS", "TERM", "QUIT", "HUP", "ALRM", "USR1", "XCPU")


def _signalled(number):
    def do():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return do


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _endless():
    while True:
        pass


def _fork_and(leave):
    def do():
        pid = os.fork()
        if pid == 0:
            leave()
        os.waitpid(pid, 0)

    return do


def _leave_child_behind():
    """Commit the fault, and end the child, for which the loop is responsible."""
    with line_from("child") as (path, line):

        def do():
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            path.write_text(str(child.pid))
            os._exit(6)

        try:
            at(1, 3, do)()
        finally:
            os.kill(int(line()), signal.SIGKILL)


def _faulthandler():
    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGSEGV)


_LATE = {"timeout": 2}

FAULTS = [
    *(
        Fault(f"a worker gets SIG{name}", at(1, 3, _signalled(getattr(signal, f"SIG{name}"))), quick=name == "SEGV")
        for name in _SIGNALS
    ),
    Fault("a worker gets SIGKILL", at(1, 3, _kill), quick=True),
    Fault("a worker that shares each batch gets SIGKILL", at(1, 3, _kill, split_batches=True)),
    Fault("a worker gets SIGINT", at(1, 3, lambda: os.kill(os.getpid(), signal.SIGINT))),
    Fault(
        "a worker is killed in a collective",
        on(1, lambda: (threading.Timer(0.3, _kill).start(), time.sleep(1), collective()), collective),
    ),
    Fault("a worker is killed when rank 0 has returned", on(1, lambda: (time.sleep(0.5), _kill()))),
    Fault("a worker calls os._exit(0)", at(1, 3, lambda: os._exit(0))),
    *(
        Fault(f"a worker calls os._exit(3) in its {place} step", at(1, step, lambda: os._exit(3)))
        for place, step in (("first", 0), ("last", LAST_STEP))
    ),
    Fault("a worker calls sys.exit(0)", at(1, 3, lambda: sys.exit(0))),
    Fault("a worker calls sys.exit(3)", at(1, 3, lambda: sys.exit(3))),
    Fault("a worker calls sys.exit with words", at(1, 3, lambda: sys.exit("bye")), quick=True),
    Fault("a worker reads address 0", at(1, 3, lambda: ctypes.string_at(0))),
    Fault("a worker with faulthandler crashes", at(1, 3, _faulthandler)),
    Fault("a worker ends, and its child in another session continues", _leave_child_behind, quick=True),
    Fault("a worker ends and leaves a child", at(1, 3, lambda: (subprocess.Popen(["sleep", "60"]), os._exit(6)))),
    Fault(
        "a worker's thread goes on after the loop",
        at(1, LAST_STEP, lambda: threading.Thread(target=time.sleep, args=(60,)).start()),
    ),
    Fault("a worker forks, and the child leaves by os._exit", at(1, 3, _fork_and(lambda: os._exit(0)))),
    Fault("a worker forks, and the child leaves by sys.exit", at(1, 3, _fork_and(sys.exit))),
    Fault("rank 0 forks, and the child leaves by os._exit", at(0, 3, _fork_and(lambda: os._exit(0))), apart=True),
    Fault("rank 0 forks, and the child leaves by sys.exit", at(0, 3, _fork_and(sys.exit)), apart=True),
    Fault("rank 0 forks, and the child raises", at(0, 3, _fork_and(lambda: 1 / 0)), apart=True),
    Fault("a worker is stopped by SIGSTOP", at(1, 3, lambda: os.kill(os.getpid(), signal.SIGSTOP), **_LATE)),
    Fault("a worker is in an endless loop", at(1, 3, _endless, **_LATE)),
    Fault(
        "a worker is in an endless loop while rank 0 waits in a collective of the loop",
        on(1, _endless, collective, **_LATE),
    ),
    Fault("a worker is in an endless loop after rank 0 has returned", on(1, _endless, **_LATE)),
    Fault("a worker sleeps in C and holds the GIL", at(1, 3, lambda: ctypes.PyDLL(None).sleep(60), **_LATE)),
    Fault("rank 0 is late, and a worker waits for it", at(0, 3, lambda: time.sleep(4), **_LATE)),
]
