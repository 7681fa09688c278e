"""Faults: standard streams that are closed, full, missing, or flooded with output."""

import os
import subprocess
import sys
import time

from faults.fault import Fault
from faults.runs import at, attribute, script, train


class Raising:
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
    """Return a function that closes descriptors of its dedicated process, and lets a worker raise."""

    def commit():
        for each in descriptors:
            os.close(each)
        at(1, 3, _fails_in_words, verbose="all")()

    return commit


def _python_s_streams_closed():
    _closes_its_streams()
    train()


def _stopped_reading():
    """Run a program whose standard output has lost its reader, as with ``| head``."""
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
    """Let a worker print more than a pipe holds, while nobody reads standard output."""
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
    """Return a function that lets a worker write to standard error, and then fail."""

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


_MEGABYTE = 1 << 20

FAULTS = [
    Fault("sys.stdout and sys.stderr are None, and a worker raises", _with_stream(None), quick=True),
    Fault("sys.stdout and sys.stderr raise, and a worker raises", _with_stream(Raising())),
    Fault("standard error is closed, and a worker raises", _closed(2), apart=True, begins=True),
    Fault("all standard streams are closed, and a worker raises", _closed(0, 1, 2), apart=True, begins=True),
    Fault("Python's standard streams are closed", _python_s_streams_closed, apart=True, begins=True),
    Fault("nobody reads standard output any more (| head)", _stopped_reading, begins=True),
    Fault("nobody reads standard output for a while", _full_pipe, begins=True),
    Fault("a worker writes 50 MB of lines to standard error", _written(b"x" * 99 + b"\n", 500_000)),
    Fault("a worker writes 50 MB without the end of a line", _written(b"x" * _MEGABYTE, 50)),
    Fault("a worker writes binary noise", _written(bytes(range(256)) * 40, 100)),
    Fault("a worker closes its standard streams", at(1, 3, _closes_its_streams)),
    Fault("a worker asks for input", at(1, 3, input)),
]
