"""Faults: a process that is set up oddly: its hooks, handlers, paths, names and interpreter."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import torch

from faults.fault import BEFORE, EPOCH, STARTING, Fault
from faults.runs import OPTIONS, at, attribute, environ, on_each, raising, run, train
from nano_loop import NanoConfigError, NanoError, nano


def _in(do, *contexts):
    """Return what calls `do` in contexts that are made when it is called."""

    def commit():
        with contextlib.ExitStack() as stack:
            for make in contexts:
                stack.enter_context(make())
            do()

    return commit


def _raises(*arguments):
    raise ZeroDivisionError("of a hook")


@contextlib.contextmanager
def _undone(do, undo):
    """Do something for the body."""
    do()
    try:
        yield
    finally:
        undo()


def _handled(number, handler):
    return _undone(partial(signal.signal, number, handler), partial(signal.signal, number, signal.getsignal(number)))


def _path(*entries):
    return attribute(sys, "path", [*entries, *sys.path])


def _thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    return _undone(thread.start, lambda: (stop.set(), thread.join()))


@contextlib.contextmanager
def _faulthandler():
    before = faulthandler.is_enabled()
    faulthandler.enable(sys.__stderr__)
    yield
    if not before:
        faulthandler.disable()


@contextlib.contextmanager
def _deleted_working_folder():
    before, folder = os.getcwd(), Path(os.environ["TMPDIR"]) / "working"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _interpreter(content):
    """Let ``sys.executable`` be a program of the shell, or what it is given as."""
    path = Path(os.environ["TMPDIR"]) / "python"
    is_script = isinstance(content, str) and not content.startswith("/")
    if is_script:
        path.write_text(f"#!/bin/sh\n{content}\n")
        path.chmod(0o755)
    with attribute(sys, "executable", str(path) if is_script else content):
        yield
    path.unlink(missing_ok=True)


def _not_started(what, content, *words, **settings):
    return Fault(
        what,
        STARTING,
        _in(train, lambda: _interpreter(content)),
        words=("rank 1", *words),
        rank=1,
        begins=True,
        **settings,
    )


def _changes_folder():
    os.chdir("/")


def _one_cpu(**variables):
    """Return what asks for two processes where the process may use one CPU, as these variables make libgomp do."""

    @contextlib.contextmanager
    def narrowed():
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def commit():
        with environ(**variables), narrowed():
            nano(**OPTIONS | {"cpu_for_each_process": None})(lambda model: None)(torch.nn.Linear(1, 1))

    return commit


def _in_a_group():
    store = torch.distributed.HashStore()
    with attribute(sys, "excepthook", sys.excepthook):  # torch replaces it
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            train()
        finally:
            torch.distributed.destroy_process_group()


def _inner():
    return nano(**OPTIONS)(lambda model: None)(torch.nn.Linear(1, 1))


def _hanging():
    with _interpreter("exec sleep 60"):
        run(timeout=2)


_RAISES = at(1, 3, raising(ValueError, "a bad batch"))
_HOOKS = [
    ("sys.excepthook raises", lambda: attribute(sys, "excepthook", _raises)),
    ("threading.excepthook raises", lambda: attribute(threading, "excepthook", _raises)),
    (
        "sys.settrace is in use",
        lambda: _undone(lambda: sys.settrace(lambda *_: None), partial(sys.settrace, sys.gettrace())),
    ),
    ("garbage collection is disabled", lambda: _undone(gc.disable, gc.enable)),
    ("SIGCHLD is ignored", lambda: _handled(signal.SIGCHLD, signal.SIG_IGN)),
    ("SIGPIPE ends the process", lambda: _handled(signal.SIGPIPE, signal.SIG_DFL)),
    ("SIGTERM is handled by the program", lambda: _handled(signal.SIGTERM, lambda *arguments: None)),
    ("SIGINT is ignored", lambda: _handled(signal.SIGINT, signal.SIG_IGN)),
    ("faulthandler is enabled", _faulthandler),
    ("a thread of the program runs on", _thread),
    ("warnings are errors", _warnings_are_errors),
]
_PLACES = [
    ("sys.path holds bytes and None", lambda: _path(b"/nowhere", None)),
    ("sys.path holds a relative folder that does not exist", lambda: _path("nowhere", "")),
    ("sys.argv holds half a surrogate and no strings", lambda: attribute(sys, "argv", ["x\udc80", "\0"])),
    ("the environment holds half a surrogate", lambda: environ(ODD="\udc80\udcff")),
    ("the environment has a megabyte", lambda: environ(**{f"LARGE_{n}": "x" * 100_000 for n in range(10)})),
    ("the working folder has been deleted", _deleted_working_folder),
]

FAULTS = [
    *(
        Fault(f"{what}, and a worker raises", EPOCH, _in(_RAISES, make), words=("a bad batch",), rank=1)
        for what, make in _HOOKS
    ),
    *(Fault(what, STARTING, _in(train, make), None, begins=True) for what, make in _PLACES),
    Fault("a rank changes its working folder", EPOCH, at(1, 3, _changes_folder), None),
    _not_started("sys.executable is None", None, "sys.executable is None"),
    _not_started("sys.executable is missing", "/nowhere/python", "/nowhere/python"),
    _not_started("sys.executable is no Python", "exit 7", "exit code 7"),
    _not_started("sys.executable writes words and ends", "echo it is broken >&2", "it is broken"),
    Fault(
        "sys.executable hangs",
        STARTING,
        _hanging,
        words=("rank 1 did not start within 2 s", "Check that its Python starts"),
        rank=1,
        begins=True,
    ),
    Fault(
        "OMP_PROC_BIND leaves the process one CPU",
        BEFORE,
        _one_cpu(OMP_PROC_BIND="close"),
        NanoConfigError,
        ("num_processes=2", "2 physical cores", "OMP_PROC_BIND=close"),
        quick=True,
    ),
    Fault(
        "GOMP_CPU_AFFINITY leaves the process one CPU",
        BEFORE,
        _one_cpu(GOMP_CPU_AFFINITY="0"),
        NanoConfigError,
        ("num_processes=2", "2 physical cores", "GOMP_CPU_AFFINITY=0"),
    ),
    Fault("the process is in a process group", BEFORE, _in_a_group, NanoError, ("already in a process group of 1",)),
    Fault(
        "a run is started inside a run",
        EPOCH,
        on_each(lambda rank: _inner()),
        NanoError,
        ("a run inside a run of 2 processes", "num_processes=1"),
    ),
]
