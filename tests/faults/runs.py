"""The runs in which faults are committed, and helpers that place a fault in a run."""

import contextlib
import functools
import itertools
import os
import select
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import torch
from distributed import small
from torch import distributed

import nano_loop
from nano_loop import nano

ROOT = Path(nano_loop.__file__).parents[1]
LAST_STEP = 7  # of a run of two ranks
OPTIONS = small.OPTIONS | {"timeout": 30}  # an error found only at this timeout is too late


def run(each_step=lambda rank, step: None, *arguments, **options):
    """Train on two ranks, calling ``each_step(rank, step)`` before each of the eight steps."""

    def fit(model, optimizer, loader, arguments):
        return small.fit(model, optimizer, loader, each_step)

    return nano(**OPTIONS | options)(fit)(*small.parts(), arguments)


def train():
    """Train for two steps, which must work after each fault."""
    return nano(**small.OPTIONS)(small.fit)(*small.parts(samples=16), epochs=1)


def at(rank, step, do, **options):
    """Return a function that trains on two ranks, and calls `do` on one of them before a step."""

    def each_step(mine, now):
        if (mine, now) == (rank, step):
            do()

    return lambda: run(each_step, **options)


def on_each(do, **options):
    """Return a function that calls ``do(rank)`` on two ranks."""

    def loop(model):
        return do(small.rank())

    return lambda: nano(**OPTIONS | options)(loop)(torch.nn.Linear(1, 1))


def on(rank, do, other=lambda: None, **options):
    """Return a function that calls `do` on one rank, and `other` on the other one."""
    return on_each(lambda mine: do() if mine == rank else other(), **options)


def collective():
    distributed.all_reduce(torch.ones(1))


def raising(make, *arguments, **named):
    """Return a function that raises ``make(*arguments, **named)``, created at that time."""

    def do():
        raise make(*arguments, **named)

    return do


class Arriving:
    """An argument that calls `do` when it is unpickled, in a worker."""

    def __init__(self, do):
        self.do = do

    def __reduce__(self):
        return _called, (self.do,)


def _called(do):
    do()
    return do


def with_argument(argument, **options):
    return lambda: run(lambda rank, step: None, argument, **options)


# Within the body, ``attribute(owner, name, value)`` replaces an attribute, and ``environ(NAME=value)`` sets variables.
attribute = mock.patch.object
environ = functools.partial(mock.patch.dict, os.environ)


@contextlib.contextmanager
def temporary(folder):
    """Set the folder for temporary files within the body."""
    with attribute(tempfile, "tempdir", str(folder)), environ(TMPDIR=str(folder)):
        yield


_SCRIPT = """
import contextlib, ctypes, os, signal, sys, threading, time
import torch
from distributed import small
from faults.runs import *
from nano_loop import NanoError, NanoWorkerError, nano
"""
_numbers = itertools.count()


def script(text):
    """Write a program that can import the same modules as rows, and return its path and environment."""
    path = Path(os.environ["TMPDIR"]) / f"script-{os.getpid()}-{next(_numbers)}.py"
    path.write_text(_SCRIPT + textwrap.dedent(text))
    return path, {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def python(text, *arguments, **options):
    path, variables = script(text)
    command = [sys.executable, str(path), *map(str, arguments)]
    settings = {"env": variables, "capture_output": True, "text": True, "timeout": 60} | options
    done = subprocess.run(command, check=False, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def line_from(name):
    """Yield a path to which another process writes a line, and a function that waits for it.

    It is a pipe, because a worker's files are private.
    """
    path = Path(os.environ["TMPDIR"]) / name
    os.mkfifo(path)
    reading = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def line(seconds=60.0):
        assert select.select([reading], [], [], seconds)[0], f"nothing was written to {path}"
        return os.read(reading, 99).decode()

    try:
        yield path, line
    finally:
        os.close(reading)
        path.unlink()
