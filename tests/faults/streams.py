"""Faults: standard streams that are closed, full, missing, or written to without an end."""

import os
import subprocess
import sys
import time

from faults.fault import EPOCH, STARTING, Fault
from faults.runs import at, attribute, script, train


class Raising:
    """A stream of the program's that raises."""

    def write(self, text):
        raise OSError("of the stream")

    def flush(self):
        raise OSError("of the stream")


def _with_stream(stream):
    def commit():
        with attribute(sys, "stderr", stream), attribute(sys, "stdout", stream):
            at(1, 3, _fails_in_words, verbose="all")()

    return commit


def _fails_in_words():
    os.write(2, b"words\n")
    raise ValueError("a bad batch")


def _closed(*descriptors):
    """Return what closes descriptors of the process, which does nothing else, and has a worker raise."""

    def commit():
        for each in descriptors:
            os.close(each)
        at(1, 3, _fails_in_words, verbose="all")()

    return commit


def _python_s_streams_closed():
    sys.stdin.close()
    sys.stdout.close()
    sys.stderr.close()
    train()


def _stopped_reading():
    """Run a program whose standard output nobody reads any more, as ``| head`` does."""
    path, variables = script(
        """
        print("begun", flush=True)
        time.sleep(0.5)
        def fit(model):
            if small.rank() == 0:
                print("nobody reads this", flush=True)
            collective()
        try:
            nano(**OPTIONS)(fit)(torch.nn.Linear(1, 1))
        except BrokenPipeError:
            train()
            os._exit(33)
        """
    )
    with subprocess.Popen([sys.executable, path], env=variables, stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        program.stdout.close()
        assert program.wait(60) == 33


def _full_pipe():
    """Have a worker print more than a pipe holds, where nobody reads standard output for a while."""
    path, variables = script(
        """
        def fit(model):
            if small.rank() == 1:
                print("x" * 300_000)
            collective()
        nano(**OPTIONS | {"verbose": "all"})(fit)(torch.nn.Linear(1, 1))
        """
    )
    with subprocess.Popen([sys.executable, path], env=variables, stdout=subprocess.PIPE) as program:
        time.sleep(3)
        assert program.stdout.read().count(b"x") == 300_000
        assert program.wait(60) == 0


def _written(content, times):
    """Return what has a worker write to standard error, and then fail."""

    def do():
        for _ in range(times):
            rest = content
            while rest:
                rest = rest[os.write(2, rest) :]
        os._exit(4)

    def commit():
        with open(os.devnull, "w") as nowhere, attribute(sys, "stderr", nowhere):
            at(1, 3, do)()

    return commit


def _closes_its_streams():
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def _reads_input():
    input()


_MEGABYTE = 1 << 20
_BAD_BATCH = {"words": ("rank 1 raised ValueError: a bad batch",), "rank": 1}
_LAST_WORDS = {
    "words": ("rank 1 ended its process with exit code 4", "See its previous output"),
    "rank": 1,
    "exitcode": 4,
}

FAULTS = [
    Fault(
        "sys.stdout and sys.stderr are None, and a worker raises", EPOCH, _with_stream(None), **_BAD_BATCH, quick=True
    ),
    Fault("sys.stdout and sys.stderr raise, and a worker raises", EPOCH, _with_stream(Raising()), **_BAD_BATCH),
    Fault("standard error is closed, and a worker raises", EPOCH, _closed(2), **_BAD_BATCH, apart=True, begins=True),
    Fault(
        "all standard streams are closed, and a worker raises",
        STARTING,
        _closed(0, 1, 2),
        **_BAD_BATCH,
        apart=True,
        begins=True,
    ),
    Fault("Python's standard streams are closed", STARTING, _python_s_streams_closed, None, apart=True, begins=True),
    Fault(
        "nobody reads standard output any more (| head)",
        EPOCH,
        _stopped_reading,
        None,
        begins=True,
        result="`BrokenPipeError`, as in one process",
    ),
    Fault("nobody reads standard output for a while", EPOCH, _full_pipe, None, begins=True),
    Fault(
        "a worker writes 50 MB of lines to standard error", EPOCH, _written(b"x" * 99 + b"\n", 500_000), **_LAST_WORDS
    ),
    Fault("a worker writes 50 MB without the end of a line", EPOCH, _written(b"x" * _MEGABYTE, 50), **_LAST_WORDS),
    Fault("a worker writes binary noise", EPOCH, _written(bytes(range(256)) * 40, 100), **_LAST_WORDS),
    Fault("a worker closes its standard streams", EPOCH, at(1, 3, _closes_its_streams), None),
    Fault("a worker asks for input", EPOCH, at(1, 3, _reads_input), words=("rank 1 raised EOFError",), rank=1),
]
