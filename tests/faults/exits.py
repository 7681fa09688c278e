"""Faults: a worker's process ends, is killed or stands still."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time

from faults.fault import AFTER, COLLECTIVE, EPOCH, FIRST, LAST, Fault
from faults.runs import LAST_STEP, at, collective, line_from, on

_CRASHES = ("SEGV", "ABRT", "BUS", "FPE", "ILL", "TRAP", "SYS")
_ENDS = ("TERM", "QUIT", "HUP", "ALRM", "USR1", "XCPU")


def _signalled(number):
    def do():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return do


def _signals(names, verb):
    return [
        Fault(
            f"a worker gets SIG{name}",
            EPOCH,
            at(1, 3, _signalled(getattr(signal, f"SIG{name}"))),
            words=(f"rank 1 {verb} SIG{name}", "a run needs all of its ranks"),
            rank=1,
            exitcode=-getattr(signal, f"SIG{name}"),
            quick=name in ("SEGV",),
        )
        for name in names
    ]


def _abort():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).abort()


def _overflow():
    """Use up the stack of C."""
    comparing = ctypes.CFUNCTYPE(ctypes.c_int)

    def deeper():
        return again()

    again = comparing(deeper)
    sys.setrecursionlimit(1 << 30)
    again()


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _endless():
    while True:
        pass


def _dawdle():
    time.sleep(4)


def _fork_and(leave):
    def do():
        pid = os.fork()
        if pid == 0:
            leave()
        os.waitpid(pid, 0)

    return do


def _leave_child_behind():
    """Commit it, and end the child, which is the loop's own to end."""
    with line_from("child") as (path, line):

        def do():
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            path.write_text(str(child.pid))
            os._exit(6)

        try:
            at(1, 3, do)()
        finally:
            os.kill(int(line()), signal.SIGKILL)


def _child_in_its_group():
    subprocess.Popen(["sleep", "60"])
    os._exit(6)


def _thread_goes_on():
    threading.Thread(target=time.sleep, args=(60,)).start()


def _faulthandler():
    import faulthandler

    faulthandler.enable()
    _signalled_without_default()


def _signalled_without_default():
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit(what, do, code, *words, when=EPOCH, step=3, **settings):
    words = words or (f"rank 1 ended its process with exit code {code}",)
    return Fault(what, when, at(1, step, do), words=words, rank=1, exitcode=code, **settings)


_LATE = {"timeout": 2}

FAULTS = [
    *_signals(_CRASHES, "crashed with"),
    *_signals(_ENDS, "was ended by"),
    Fault(
        "a worker gets SIGKILL",
        EPOCH,
        at(1, 3, lambda: os.kill(os.getpid(), 9)),
        words=("rank 1 was killed by SIGKILL", "memory"),
        rank=1,
        exitcode=-9,
        quick=True,
    ),
    Fault(
        "a worker that shares each batch gets SIGKILL",
        EPOCH,
        at(1, 3, lambda: os.kill(os.getpid(), 9), split_batches=True),
        words=("rank 1 was killed by SIGKILL", "memory"),
        rank=1,
        exitcode=-9,
    ),
    Fault(
        "a worker gets SIGINT",
        EPOCH,
        at(1, 3, lambda: os.kill(os.getpid(), signal.SIGINT)),
        words=("rank 1 raised KeyboardInterrupt",),
        rank=1,
    ),
    Fault(
        "a worker is killed in a collective",
        COLLECTIVE,
        on(
            1,
            lambda: (threading.Timer(0.3, os.kill, (os.getpid(), 9)).start(), time.sleep(1), collective()),
            collective,
        ),
        words=("rank 1 was killed by SIGKILL",),
        rank=1,
    ),
    Fault(
        "a worker is killed when rank 0 has returned",
        AFTER,
        on(1, lambda: (time.sleep(0.5), os.kill(os.getpid(), 9))),
        words=("rank 1 was killed by SIGKILL",),
        rank=1,
        exitcode=-9,
    ),
    _exit("a worker calls os._exit(0)", lambda: os._exit(0), 0),
    _exit("a worker calls os._exit(3) in its first step", lambda: os._exit(3), 3, when=FIRST, step=0),
    _exit("a worker calls os._exit(3) in its last step", lambda: os._exit(3), 3, when=LAST, step=LAST_STEP),
    _exit("a worker calls sys.exit(0)", lambda: sys.exit(0), 0, "rank 1 called sys.exit(0)"),
    _exit("a worker calls sys.exit(3)", lambda: sys.exit(3), 3, "rank 1 called sys.exit(3)"),
    _exit(
        "a worker calls sys.exit with words", lambda: sys.exit("bye"), 1, "rank 1 called sys.exit('bye')", quick=True
    ),
    _exit("a worker calls abort() in C", _abort, -signal.SIGABRT, "rank 1 crashed with SIGABRT"),
    _exit("a worker uses up the stack of C", _overflow, -signal.SIGSEGV, "rank 1 crashed with SIGSEGV"),
    _exit("a worker reads address 0", lambda: ctypes.string_at(0), -signal.SIGSEGV, "rank 1 crashed with SIGSEGV"),
    _exit(
        "a worker with faulthandler crashes",
        _faulthandler,
        -signal.SIGSEGV,
        "rank 1 crashed with SIGSEGV",
        "See its previous output",
        "Segmentation fault",
        "_signalled_without_default",
    ),
    Fault(
        "a worker ends and its child in another session lives on",
        EPOCH,
        _leave_child_behind,
        words=("rank 1 ended its process with exit code 6",),
        rank=1,
        exitcode=6,
        quick=True,
    ),
    _exit("a worker ends and leaves a child", _child_in_its_group, 6),
    Fault("a worker's thread goes on after the loop", AFTER, at(1, LAST_STEP, _thread_goes_on), None),
    Fault("a worker forks, and the child leaves by os._exit", EPOCH, at(1, 3, _fork_and(lambda: os._exit(0))), None),
    Fault("a worker forks, and the child leaves by sys.exit", EPOCH, at(1, 3, _fork_and(sys.exit)), None),
    Fault(
        "rank 0 forks, and the child leaves by os._exit",
        EPOCH,
        at(0, 3, _fork_and(lambda: os._exit(0))),
        None,
        apart=True,
    ),
    Fault("rank 0 forks, and the child leaves by sys.exit", EPOCH, at(0, 3, _fork_and(sys.exit)), None, apart=True),
    Fault("rank 0 forks, and the child raises", EPOCH, at(0, 3, _fork_and(lambda: 1 / 0)), None, apart=True),
    Fault(
        "a worker is stopped by SIGSTOP",
        EPOCH,
        at(1, 3, _stop, **_LATE),
        words=("waited 2 seconds for rank 1", "stopped", "kill -CONT"),
        rank=1,
    ),
    Fault(
        "a worker is in an endless loop",
        EPOCH,
        at(1, 3, _endless, **_LATE),
        words=("waited 2 seconds", "in _endless"),
        rank=1,
    ),
    Fault(
        "a worker is in an endless loop while rank 0 waits in a collective of the loop",
        COLLECTIVE,
        on(1, _endless, collective, **_LATE),
        words=("waited 2 seconds", "in _endless"),
        rank=1,
    ),
    Fault(
        "a worker is in an endless loop after rank 0 has returned",
        AFTER,
        on(1, _endless, **_LATE),
        words=("rank 1 did not return from the loop after rank 0 within 2 s", "in _endless"),
        rank=1,
    ),
    Fault(
        "a worker sleeps in C with Python's lock held",
        EPOCH,
        at(1, 3, lambda: ctypes.PyDLL(None).sleep(60), **_LATE),
        words=("waited 2 seconds for rank 1", "exits.py"),
        rank=1,
    ),
    Fault(
        "rank 0 is late, and a worker waits for it",
        EPOCH,
        at(0, 3, _dawdle, **_LATE),
        words=("rank 1 has waited 2 seconds for rank 0", "exits.py"),
        rank=0,
    ),
]
