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


def _refused():
    socket.create_connection(("127.0.0.1", 1), timeout=5)


def _recursion():
    return _recursion()


def _group():
    raise _Group("two things", [ValueError("one"), KeyError("other")])


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


def _raised(what, do, *words, when=EPOCH, **settings):
    step = {FIRST: 0, EPOCH: 3, LAST: LAST_STEP}[when]
    return Fault(what, when, at(1, step, do), words=words, rank=1, **settings)


def _break_the_beginning(do):
    """Return what has `do` called in the worker once it has reported that it is ready."""

    def patch():
        from nano_loop.distributed.launch import worker

        worker.whole_process = lambda *arguments: do()

    return patch


def _joining(do):
    return with_argument(Arriving(_break_the_beginning(do)))


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
        "a worker that shares each batch raises",
        EPOCH,
        at(1, 3, raising(ValueError, "a bad batch"), split_batches=True),
        words=("rank 1 raised ValueError: a bad batch",),
        rank=1,
        cause=ValueError,
    ),
    Fault(
        "a handler of SIGCHLD raises while a worker reports its exception",
        EPOCH,
        at(1, 3, _interrupted),
        words=("rank 1 raised _InterruptedError: bad batch",),
        rank=1,
    ),
    _raised(
        "a worker raises before its first step",
        raising(ValueError, "a bad batch"),
        "rank 1 raised ValueError: a bad batch",
        "a run needs all of its ranks",
        "Fix the error in its traceback",
        when=FIRST,
        cause=ValueError,
    ),
    _raised(
        "a worker raises between two steps",
        raising(ValueError, "a bad batch"),
        "rank 1 raised ValueError: a bad batch",
        "in do",
        cause=ValueError,
        quick=True,
    ),
    _raised(
        "a worker raises before its last step",
        raising(ValueError, "a bad batch"),
        "rank 1 raised ValueError: a bad batch",
        when=LAST,
        cause=ValueError,
    ),
    Fault(
        "a worker raises when rank 0 has returned",
        AFTER,
        on(1, lambda: (time.sleep(0.5), raising(OSError, 5, "broken disk")())),
        words=("rank 1 raised OSError: [Errno 5] broken disk",),
        rank=1,
        cause=OSError,
    ),
    Fault(
        "a worker raises while rank 0 waits in a collective of the loop",
        "in a collective",
        on(1, raising(LookupError, "no such row"), collective),
        words=("rank 1 raised LookupError: no such row",),
        rank=1,
        cause=LookupError,
        quick=True,
    ),
    _raised(
        "an exception of a worker cannot be pickled", raising(StubbornError, "as it is"), "StubbornError: as it is"
    ),
    _raised(
        "an exception of a worker cannot be unpickled in rank 0",
        lambda: raising(OneWayError, "one way", None, _refuse)(),
        "OneWayError: one way",
        quick=True,
    ),
    _raised(
        "the message of an exception raises", raising(MuteError), "raised MuteError", "its message raises ValueError"
    ),
    _raised(
        "the message of an exception has 200 MB",
        lambda: raising(ValueError, "x" * 200_000_000)(),
        "rank 1 raised ValueError: xxx",
    ),
    _raised(
        "the message of an exception has lines, zeros and half a surrogate",
        raising(ValueError, "first\nsecond \0 \udc80"),
        "rank 1 raised ValueError: first",
        cause=ValueError,
    ),
    _raised("a worker raises an exception group", _group, "ExceptionGroup: two things", cause=_Group),
    _raised("an exception has 300 causes, each of the next", _chain, "rank 1 raised ValueError: number 299"),
    _raised("an exception takes required keywords", lambda: raising(KeywordError, code=7)(), "KeywordError: code 7"),
    _raised("the class of an exception is nested", raising(Outer.InnerError, "inner"), "InnerError: inner"),
    _raised("the class of an exception is local to a function", _local, "LocalError: made here"),
    _raised("a worker raises StopIteration", raising(StopIteration, 3), "StopIteration: 3", cause=StopIteration),
    _raised("a worker raises GeneratorExit", raising(GeneratorExit), "raised GeneratorExit", cause=GeneratorExit),
    _raised("a worker raises a BaseException", raising(SuddenError, "sudden"), "SuddenError: sudden"),
    _raised("a worker raises KeyboardInterrupt", raising(KeyboardInterrupt), "raised KeyboardInterrupt"),
    _raised("a worker raises MemoryError", raising(MemoryError), "raised MemoryError", cause=MemoryError),
    _raised("a worker recurses without an end", _recursion, "raised RecursionError", cause=RecursionError),
    _raised(
        "a worker raises ConnectionResetError of a connection of the loop's",
        raising(ConnectionResetError, 104, "Connection reset by peer"),
        "rank 1 raised ConnectionResetError: [Errno 104]",
        cause=ConnectionResetError,
        quick=True,
    ),
    _raised(
        "a worker raises BrokenPipeError of a pipe of the loop's",
        raising(BrokenPipeError, 32, "Broken pipe"),
        "rank 1 raised BrokenPipeError: [Errno 32]",
        cause=BrokenPipeError,
    ),
    _raised(
        "a socket is refused in a worker",
        _refused,
        "rank 1 raised ConnectionRefusedError",
        cause=ConnectionRefusedError,
    ),
    _raised(
        "a worker raises in the words of a lost connection between ranks",
        raising(RuntimeError, "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
        "rank 1 raised RuntimeError: [../gloo",
        cause=RuntimeError,
    ),
    _raised(
        "a worker raises nano_loop's own error", raising(NanoError, "a: b. c."), "rank 1 raised NanoError: a: b. c"
    ),
    _raised(
        "a worker raises an error of a rank, with its keywords",
        lambda: raising(NanoWorkerError, "a: b. c.", rank=5)(),
        "rank 1 raised NanoWorkerError",
        cause=NanoWorkerError,
    ),
    Fault(
        "a worker raises when it is ready",
        JOINING,
        _joining(raising(ValueError, "between")),
        words=("rank 1 raised ValueError: between",),
        rank=1,
        cause=ValueError,
        quick=True,
    ),
    Fault(
        "a worker ends when it is ready",
        JOINING,
        _joining(lambda: os._exit(5)),
        words=("rank 1 ended its process with exit code 5",),
        rank=1,
        exitcode=5,
    ),
    Fault(
        "a worker is killed when it is ready",
        JOINING,
        _joining(lambda: os.kill(os.getpid(), 9)),
        words=("rank 1 was killed by SIGKILL",),
        rank=1,
        exitcode=-9,
    ),
]
