"""Faults: a worker raises, whatever the exception is like."""

import builtins
import os
import signal
import socket
import time

from faults.fault import AFTER, EPOCH, FIRST, JOINING, LAST, Fault
from faults.runs import LAST_STEP, Arriving, at, collective, on, raising, with_argument
from nano_loop import NanoError, NanoWorkerError

# Of Python 3.11 and later.
_Group = getattr(builtins, "ExceptionGroup", None) or type("ExceptionGroup", (Exception,), {})


class StubbornError(Exception):
    def __reduce__(self):
        raise TypeError("never")


class OneWayError(Exception):
    """Comes back in the process that raised it, and nowhere else."""

    def __init__(self, words, home=None, do=None):
        super().__init__(words)
        self.home, self.do = home or os.getpid(), do

    def __reduce__(self):
        return _returned, (self.args[0], self.home, self.do)


def _returned(words, home, do):
    if os.getpid() != home:
        do()
    return OneWayError(words, home, do)


def _refuse():
    raise TypeError("cannot be unpickled here")


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no words")


class KeywordError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class Outer:
    class InnerError(Exception):
        pass


class SuddenError(BaseException):
    pass


def _recursion():
    return _recursion()


def _chain():
    error = ValueError("number 0")
    for number in range(1, 300):
        following = ValueError(f"number {number}")
        following.__cause__, error = error, following
    raise error


def _local():
    class LocalError(Exception):
        pass

    raise LocalError("made here")


def _raised(what, do, said, *words, when=EPOCH, **settings):
    step = {FIRST: 0, EPOCH: 3, LAST: LAST_STEP}[when]
    return Fault(what, when, at(1, step, do), words=(f"rank 1 raised {said}", *words), **settings)


def _joining(do):
    """Return what has `do` called in the worker once it has reported that it is ready."""

    def patch():
        from nano_loop.distributed.launch import worker

        worker.whole_process = lambda *arguments: do()

    return with_argument(Arriving(patch))


class _InterruptedError(Exception):
    """A process of this one ends while the exception is shown."""

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
    Fault(
        "a handler of SIGCHLD raises while a worker reports its exception",
        EPOCH,
        at(1, 3, _interrupted),
        words=("rank 1 raised _InterruptedError: bad batch",),
    ),
    _raised(
        "a worker raises before its first step",
        raising(ValueError, "a bad batch"),
        "ValueError: a bad batch",
        "a run needs all of its ranks",
        "Fix the error in its traceback",
        when=FIRST,
    ),
    _raised(
        "a worker raises between two steps",
        raising(ValueError, "a bad batch"),
        "ValueError: a bad batch",
        "in do",
        quick=True,
    ),
    _raised(
        "a worker raises before its last step",
        raising(ValueError, "a bad batch"),
        "ValueError: a bad batch",
        when=LAST,
    ),
    Fault(
        "a worker raises when rank 0 has returned",
        AFTER,
        on(1, lambda: (time.sleep(0.5), raising(OSError, 5, "broken disk")())),
        words=("rank 1 raised OSError: [Errno 5] broken disk",),
    ),
    Fault(
        "a worker raises while rank 0 waits in a collective of the loop",
        "in a collective",
        on(1, raising(LookupError, "no such row"), collective),
        words=("rank 1 raised LookupError: no such row",),
        quick=True,
    ),
    _raised(
        "an exception of a worker cannot be pickled",
        raising(StubbornError, "as it is"),
        "StubbornError: as it is",
        travels=False,
    ),
    _raised(
        "an exception of a worker cannot be unpickled in rank 0",
        lambda: raising(OneWayError, "one way", None, _refuse)(),
        "OneWayError: one way",
        travels=False,
        quick=True,
    ),
    _raised("the message of an exception raises", raising(MuteError), "MuteError", "its message raises ValueError"),
    _raised(
        "the message of an exception has 200 MB",
        lambda: raising(ValueError, "x" * 200_000_000)(),
        "ValueError: xxx",
        travels=False,
    ),
    _raised(
        "the message of an exception has lines, zeros and half a surrogate",
        raising(ValueError, "first\nsecond \0 \udc80"),
        "ValueError: first",
    ),
    _raised(
        "a worker raises an exception group",
        raising(_Group, "two things", [ValueError("one"), KeyError("other")]),
        "ExceptionGroup: two things",
    ),
    _raised("an exception has 300 causes, each of the next", _chain, "ValueError: number 299"),
    _raised(
        "an exception takes required keywords",
        lambda: raising(KeywordError, code=7)(),
        "KeywordError: code 7",
        travels=False,
    ),
    _raised("the class of an exception is nested", raising(Outer.InnerError, "inner"), "InnerError: inner"),
    _raised("the class of an exception is local to a function", _local, "LocalError: made here"),
    _raised("a worker raises StopIteration", raising(StopIteration, 3), "StopIteration: 3"),
    _raised("a worker raises GeneratorExit", raising(GeneratorExit), "GeneratorExit"),
    _raised("a worker raises a BaseException", raising(SuddenError, "sudden"), "SuddenError: sudden"),
    _raised("a worker raises KeyboardInterrupt", raising(KeyboardInterrupt), "KeyboardInterrupt"),
    _raised("a worker raises MemoryError", raising(MemoryError), "MemoryError"),
    _raised("a worker recurses without an end", _recursion, "RecursionError"),
    _raised(
        "a worker raises ConnectionResetError of a connection of the loop's",
        raising(ConnectionResetError, 104, "Connection reset by peer"),
        "ConnectionResetError: [Errno 104]",
        quick=True,
    ),
    _raised(
        "a worker raises BrokenPipeError of a pipe of the loop's",
        raising(BrokenPipeError, 32, "Broken pipe"),
        "BrokenPipeError: [Errno 32]",
    ),
    _raised(
        "a socket is refused in a worker",
        lambda: socket.create_connection(("127.0.0.1", 1), timeout=5),
        "ConnectionRefusedError",
    ),
    _raised(
        "a worker raises in the words of a lost connection between ranks",
        raising(RuntimeError, "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
        "RuntimeError: [../gloo",
    ),
    _raised("a worker raises nano_loop's own error", raising(NanoError, "a: b. c."), "NanoError: a: b. c"),
    _raised(
        "a worker raises an error of a rank, with its keywords",
        lambda: raising(NanoWorkerError, "a: b. c.", rank=5)(),
        "NanoWorkerError",
    ),
    Fault(
        "a worker raises when it is ready",
        JOINING,
        _joining(raising(ValueError, "between")),
        words=("rank 1 raised ValueError: between",),
        quick=True,
    ),
    Fault(
        "a worker ends when it is ready",
        JOINING,
        _joining(lambda: os._exit(5)),
        words=("rank 1 ended its process with exit code 5",),
    ),
    Fault(
        "a worker is killed when it is ready",
        JOINING,
        _joining(lambda: os.kill(os.getpid(), 9)),
        words=("rank 1 was killed by SIGKILL",),
    ),
]
