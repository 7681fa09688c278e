"""Faults: a worker's process ends, is killed or stands still."""

import ctypes
import faulthandler
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
            quick=name in ("SEGV",),
        )
        for name in names
    ]


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


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


def _faulthandler():
    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit(what, do, said, *words, when=EPOCH, **settings):
    step = {FIRST: 0, EPOCH: 3, LAST: LAST_STEP}[when]
    return Fault(what, when, at(1, step, do), words=(f"rank 1 {said}", *words), **settings)


_LATE = {"timeout": 2}

FAULTS = [
    *_signals(_CRASHES, "crashed with"),
    *_signals(_ENDS, "was ended by"),
    _exit("a worker gets SIGKILL", _kill, "was killed by SIGKILL", "memory", quick=True),
    Fault(
        "a worker that shares each batch gets SIGKILL",
        EPOCH,
        at(1, 3, _kill, split_batches=True),
        words=("rank 1 was killed by SIGKILL", "memory"),
    ),
    _exit("a worker gets SIGINT", lambda: os.kill(os.getpid(), signal.SIGINT), "raised KeyboardInterrupt"),
    Fault(
        "a worker is killed in a collective",
        COLLECTIVE,
        on(1, lambda: (threading.Timer(0.3, _kill).start(), time.sleep(1), collective()), collective),
        words=("rank 1 was killed by SIGKILL",),
    ),
    Fault(
        "a worker is killed when rank 0 has returned",
        AFTER,
        on(1, lambda: (time.sleep(0.5), _kill())),
        words=("rank 1 was killed by SIGKILL",),
    ),
    _exit("a worker calls os._exit(0)", lambda: os._exit(0), "ended its process with exit code 0"),
    *(
        _exit(
            f"a worker calls os._exit(3) in its {step} step",
            lambda: os._exit(3),
            "ended its process with exit code 3",
            when=when,
        )
        for step, when in (("first", FIRST), ("last", LAST))
    ),
    _exit("a worker calls sys.exit(0)", lambda: sys.exit(0), "called sys.exit(0)"),
    _exit("a worker calls sys.exit(3)", lambda: sys.exit(3), "called sys.exit(3)"),
    _exit("a worker calls sys.exit with words", lambda: sys.exit("bye"), "called sys.exit('bye')", quick=True),
    _exit("a worker calls abort() in C", _abort, "crashed with SIGABRT"),
    _exit("a worker uses up the stack of C", _overflow, "crashed with SIGSEGV"),
    _exit("a worker reads address 0", lambda: ctypes.string_at(0), "crashed with SIGSEGV"),
    _exit(
        "a worker with faulthandler crashes",
        _faulthandler,
        "crashed with SIGSEGV",
        "See what it wrote before",
        "Segmentation fault",
        "in _faulthandler",
    ),
    Fault(
        "a worker ends and its child in another session lives on",
        EPOCH,
        _leave_child_behind,
        words=("rank 1 ended its process with exit code 6",),
        quick=True,
    ),
    _exit(
        "a worker ends and leaves a child",
        lambda: (subprocess.Popen(["sleep", "60"]), os._exit(6)),
        "ended its process with exit code 6",
    ),
    Fault(
        "a worker's thread goes on after the loop",
        AFTER,
        at(1, LAST_STEP, lambda: threading.Thread(target=time.sleep, args=(60,)).start()),
        None,
    ),
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
        at(1, 3, lambda: os.kill(os.getpid(), signal.SIGSTOP), **_LATE),
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
        at(0, 3, lambda: time.sleep(4), **_LATE),
        words=("rank 1 has waited 2 seconds for rank 0", "exits.py"),
        rank=0,
    ),
]
