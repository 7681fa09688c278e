"""Faults: a worker raises exceptions of all kinds."""

import builtins
import os
import signal
import socket
import time

from faults.fault import Fault
from faults.runs import LAST_STEP, Arriving, at, collective, on, raising, with_argument
from nano_loop import NanoError, NanoWorkerError

# For Python 3.11 and later.
_Group = getattr(builtins, "ExceptionGroup", None) or type("ExceptionGroup", (Exception,), {})


class StubbornError(Exception):
    def __reduce__(self):
        raise TypeError("never")


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no words")


class KeywordError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class SuddenError(BaseException):
    pass


def _recursion():
    return _recursion()


def _local():
    class LocalError(Exception):
        pass

    raise LocalError("made here")


def _joining(do):
    """Return a function that calls `do` in the worker after it has reported that it is ready."""

    def patch():
        from nano_loop.distributed.launch import worker

        worker.whole_process = lambda *arguments: do()

    return with_argument(Arriving(patch))


class _InterruptedError(Exception):
    """Exits the process that formats it."""

    @property
    def __notes__(self):
        signal.raise_signal(signal.SIGCHLD)
        return []


def _interrupted():
    def handler(number, frame):
        raise KeyError("a process has died")

    signal.signal(signal.SIGCHLD, handler)
    raise _InterruptedError("bad batch")


FAULTS = [
    Fault("a worker that shares each batch raises", at(1, 3, raising(ValueError, "a bad batch"), split_batches=True)),
    Fault("a handler of SIGCHLD raises while a worker reports its exception", at(1, 3, _interrupted)),
    Fault("a worker raises before its first step", at(1, 0, raising(ValueError, "a bad batch"))),
    Fault("a worker raises between two steps", at(1, 3, raising(ValueError, "a bad batch")), quick=True),
    Fault("a worker raises before its last step", at(1, LAST_STEP, raising(ValueError, "a bad batch"))),
    Fault(
        "a worker raises when rank 0 has returned",
        on(1, lambda: (time.sleep(0.5), raising(OSError, 5, "broken disk")())),
    ),
    Fault(
        "a worker raises while rank 0 waits in a collective of the loop",
        on(1, raising(LookupError, "no such row"), collective),
        quick=True,
    ),
    Fault("an exception of a worker cannot be pickled", at(1, 3, raising(StubbornError, "as it is")), travels=False),
    Fault(
        "an exception of a worker cannot be unpickled in rank 0",
        at(1, 3, lambda: raising(KeywordError, code=7)()),
        travels=False,
        quick=True,
    ),
    Fault("the message of an exception raises", at(1, 3, raising(MuteError))),
    Fault(
        "the message of an exception has 200 MB",
        at(1, 3, lambda: raising(ValueError, "x" * 200_000_000)()),
        travels=False,
    ),
    Fault(
        "the message of an exception has lines, zeros and a lone surrogate",
        at(1, 3, raising(ValueError, "first\nsecond \0 \udc80")),
    ),
    Fault(
        "a worker raises an exception group",
        at(1, 3, raising(_Group, "two things", [ValueError("one"), KeyError("other")])),
    ),
    Fault("the class of an exception is local to a function", at(1, 3, _local)),
    Fault("a worker raises StopIteration", at(1, 3, raising(StopIteration, 3))),
    Fault("a worker raises a BaseException", at(1, 3, raising(SuddenError, "sudden"))),
    Fault("a worker raises KeyboardInterrupt", at(1, 3, raising(KeyboardInterrupt))),
    Fault("a worker raises MemoryError", at(1, 3, raising(MemoryError))),
    Fault("a worker recurses without an end", at(1, 3, _recursion)),
    Fault(
        "a worker raises ConnectionResetError of the loop's own connection",
        at(1, 3, raising(ConnectionResetError, 104, "Connection reset by peer")),
        quick=True,
    ),
    Fault(
        "a worker raises BrokenPipeError of the loop's own pipe", at(1, 3, raising(BrokenPipeError, 32, "Broken pipe"))
    ),
    Fault("a socket is refused in a worker", at(1, 3, lambda: socket.create_connection(("127.0.0.1", 1), timeout=5))),
    Fault(
        "a worker raises an error with the text of a lost connection between ranks",
        at(1, 3, raising(RuntimeError, "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")),
    ),
    Fault("a worker raises nano_loop's own error", at(1, 3, raising(NanoError, "a: b. c."))),
    Fault(
        "a worker raises an error of a rank, with its keywords",
        at(1, 3, lambda: raising(NanoWorkerError, "a: b. c.", rank=5)()),
    ),
    Fault("a worker raises when it is ready", _joining(raising(ValueError, "between")), quick=True),
    Fault("a worker ends when it is ready", _joining(lambda: os._exit(5))),
    Fault("a worker is killed when it is ready", _joining(lambda: os.kill(os.getpid(), 9))),
]
