"""Faults: a process with unusual settings: hooks, handlers, paths, names and interpreter."""

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

from faults.fault import Fault
from faults.runs import OPTIONS, at, attribute, environ, on_each, raising, run, train
from nano_loop import nano
from nano_loop.distributed.launch_local import server as servers


def _in(do, *contexts):
    """Return a function that calls `do` in contexts that are created at that time."""

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


def _exit_of_a_new_server():
    servers.end_kept()
    at(1, 3, lambda: os._exit(7))()


@contextlib.contextmanager
def _interpreter(content):
    """Set ``sys.executable`` to a shell program or to `content`."""
    path = Path(os.environ["TMPDIR"]) / "python"
    is_script = isinstance(content, str) and not content.startswith("/")
    if is_script:
        path.write_text(f"#!/bin/sh\n{content}\n")
        path.chmod(0o755)
    with attribute(sys, "executable", str(path) if is_script else content):
        yield
    path.unlink(missing_ok=True)


def _one_cpu(**variables):
    """Return a function that requests two processes with one CPU, as these variables configure libgomp."""

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
    ("sys.argv holds a lone surrogate and no strings", lambda: attribute(sys, "argv", ["x\udc80", "\0"])),
    ("the environment holds a lone surrogate", lambda: environ(ODD="\udc80\udcff")),
    ("the environment has a megabyte", lambda: environ(**{f"LARGE_{n}": "x" * 100_000 for n in range(10)})),
    ("the working folder has been deleted", _deleted_working_folder),
]

FAULTS = [
    *(Fault(f"{what}, and a worker raises", _in(_RAISES, make)) for what, make in _HOOKS),
    Fault(
        "SIGCHLD is ignored, and a worker ends",
        _in(_exit_of_a_new_server, lambda: _handled(signal.SIGCHLD, signal.SIG_IGN)),
        begins=True,
    ),
    *(Fault(what, _in(train, make), begins=True) for what, make in _PLACES),
    Fault("a rank changes its working folder", at(1, 3, lambda: os.chdir("/"))),
    Fault("sys.executable is None", _in(train, lambda: _interpreter(None)), begins=True),
    Fault("sys.executable is missing", _in(train, lambda: _interpreter("/nowhere/python")), begins=True),
    Fault("sys.executable is no Python", _in(train, lambda: _interpreter("exit 7")), begins=True),
    Fault(
        "sys.executable writes words and ends", _in(train, lambda: _interpreter("echo it is broken >&2")), begins=True
    ),
    Fault("sys.executable hangs", _in(lambda: run(timeout=2), lambda: _interpreter("exec sleep 60")), begins=True),
    Fault("OMP_PROC_BIND leaves the process one CPU", _one_cpu(OMP_PROC_BIND="close"), quick=True),
    Fault("GOMP_CPU_AFFINITY leaves the process one CPU", _one_cpu(GOMP_CPU_AFFINITY="0")),
    Fault("the process is in a process group", _in_a_group),
    Fault(
        "a run is started inside a run",
        on_each(lambda rank: nano(**OPTIONS)(lambda model: None)(torch.nn.Linear(1, 1))),
    ),
]
