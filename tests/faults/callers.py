"""Faults: the place from which a run is started, and the fate of the process that starts it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from torch import nn

from faults.fault import Fault
from faults.runs import Arriving, at, collective, line_from, on_each, python, raising, script, train, with_argument
from nano_loop import nano
from nano_loop.distributed.launch_local import server as servers


def _in_a_thread(do):
    def commit():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(do).result()

    return commit


def _two_threads_at_once():
    inside, leave = threading.Event(), threading.Event()
    shares = [sorted(os.sched_getaffinity(0))]
    first = nano(cpu_for_each_process=shares, verbose=False)(lambda model: (inside.set(), leave.wait(20)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(first, nn.Linear(1, 1))
        try:
            assert inside.wait(20)
            train()
        finally:
            leave.set()


def _in_a_coroutine(do):
    async def main():
        do()

    return lambda: asyncio.run(main())


def _program(text, *expected):
    """Return a function that runs a program, and checks its exit code 0, the absence of errors, and its output."""

    def commit():
        shown = python(text)
        for each in expected:
            assert each in shown, shown

    return commit


def _killed(body, number=signal.SIGKILL):
    """Return a function that kills a program once its worker has written a file; the worker's memory is soon freed."""

    def commit():
        path, variables = script(body)
        with line_from("pids") as (place, line):
            command = [sys.executable, path, place]
            with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as program:
                try:
                    worker, _ = map(int, line().split())
                finally:
                    program.send_signal(number)
        deadline = time.monotonic() + 8
        while psutil.pid_exists(worker) or [*_folders(program.pid)]:
            assert time.monotonic() < deadline, f"process {worker} or its memory is left"
            time.sleep(0.05)

    return commit


def _killed_while_the_other_process_imports_torch():
    path, variables = script(_EARLY)
    with subprocess.Popen([sys.executable, path], env=variables) as program:
        assert program.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while [*_folders(program.pid)]:
        assert time.monotonic() < deadline, [*_folders(program.pid)]
        time.sleep(0.05)


def _all_killed():
    path, variables = script(_ASLEEP)
    with line_from("pids") as (place, line), subprocess.Popen([sys.executable, path, place], env=variables) as program:
        _, server = map(int, line().split())
        program.send_signal(signal.SIGSTOP)  # it would clean up otherwise
        assert [*_folders(program.pid)]
        os.kill(server, signal.SIGKILL)
        program.kill()
    assert train() == 2
    assert not [*_folders(program.pid)]


def _folders(pid):
    for parent in ("/dev/shm", os.environ["TMPDIR"]):
        yield from Path(parent).glob(f"nano_loop-{pid}-*")


_TELL = """
def tell():
    with open(sys.argv[1], "w") as pipe:
        pipe.write(f"{os.getpid()} {os.getppid()}")
"""
_ASLEEP = f"""{_TELL}
def fit(model):
    if small.rank() == 1:
        tell()
    time.sleep(100)
nano(**OPTIONS)(fit)(torch.nn.Linear(1, 1))
"""
_EARLY = """
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
train()
"""
_LOCKED = f"""{_TELL}
def fit(model):
    if small.rank() == 1:
        tell()
        ctypes.PyDLL(None).sleep(100)
    time.sleep(100)
nano(**OPTIONS)(fit)(torch.nn.Linear(1, 1))
"""
_WRITING = f"""{_TELL}
class Slow:
    def __reduce__(self):
        tell()
        time.sleep(100)
nano(**OPTIONS)(lambda model, slow: None)(torch.nn.Linear(1, 1), Slow())
"""
_LOADING = f"""{_TELL}
def told():
    tell()
    time.sleep(100)
nano(**OPTIONS)(lambda model, data, late: None)(torch.nn.Linear(1, 1), torch.ones(1 << 28), Arriving(told))
"""
_FORKED = """
import multiprocessing
def child():
    assert train() == 2
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
assert process.exitcode == 0
print("trained", train())
"""
_SPAWNED = """
import multiprocessing
class Line(torch.nn.Linear):
    pass
class OwnError(Exception):
    pass
def loop(model, fails):
    assert type(model) is Line
    if fails and small.rank() == 1:
        raise OwnError("of the main program")
    return small.rank()
def child():
    assert nano(**OPTIONS)(loop)(Line(1, 1), False) == 0
    try:
        nano(**OPTIONS)(loop)(Line(1, 1), True)
    except NanoWorkerError as error:
        assert "rank 1 raised OwnError: of the main program" in str(error), error
        os._exit(21)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 21, process.exitcode
    print("trained")
"""
_POOL = """
import copy, multiprocessing
def failing(number):
    at(1, 3, raising(ValueError, "a bad batch"))()
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply_async(failing, (0,)).get(60)
        except NanoWorkerError as error:
            for each in (error, copy.copy(error), copy.deepcopy(error)):
                assert (each.rank, each.exitcode, "in do" in each.traceback) == (1, None, True)
                assert "rank 1 raised ValueError: a bad batch" in str(each)
            print("raised")
"""


def _server():
    (server,) = servers.kept
    return server.pid


def _killed_between_runs():
    train()
    server = psutil.Process(_server())
    server.kill()
    server.wait()
    assert train() == 2


def _in_a_run(number, then=lambda rank: None):
    """Return a function that signals the process that forks workers during a run, which then calls ``then(rank)``."""

    def do(rank):
        if rank == 1:
            os.kill(os.getppid(), number)
        then(rank)

    return on_each(do)


def _while_a_worker_starts(number):
    def do():
        os.kill(os.getppid(), number)
        time.sleep(20)

    return with_argument(Arriving(do))


FAULTS = [
    Fault(
        "a run in a thread, and a worker raises", _in_a_thread(at(1, 3, raising(ValueError, "a bad batch"))), quick=True
    ),
    Fault("two threads start runs at once", _two_threads_at_once),
    Fault("a run in a coroutine", _in_a_coroutine(train)),
    Fault("a run in a coroutine, and a worker raises", _in_a_coroutine(at(1, 3, raising(ValueError, "a bad batch")))),
    Fault("a run in a forked child of multiprocessing", _program(_FORKED, "trained 2"), seconds=40),
    Fault(
        "a run of the main program's functions in a spawned child of multiprocessing",
        _program(_SPAWNED, "trained"),
        seconds=40,
    ),
    Fault("a run fails in a pool of multiprocessing", _program(_POOL, "raised"), seconds=40),
    Fault("the caller is killed", _killed(_ASLEEP), begins=True),
    Fault(
        "the caller is killed while the process that workers are forked from imports torch",
        _killed_while_the_other_process_imports_torch,
        begins=True,
    ),
    Fault("all processes of a run are killed at once", _all_killed, begins=True),
    Fault("the caller gets SIGTERM", _killed(_ASLEEP, signal.SIGTERM), begins=True),
    Fault("the caller is killed while a worker holds the GIL in C", _killed(_LOCKED), begins=True),
    Fault("the caller is killed while it writes the arguments", _killed(_WRITING), begins=True),
    Fault("the caller is killed while a worker reads 1 GB of arguments", _killed(_LOADING), begins=True),
    Fault(
        "the process that workers are forked from is killed between two runs",
        _killed_between_runs,
        begins=True,
    ),
    *(
        Fault(
            f"the process that workers are forked from gets SIG{name} {when}",
            commit(getattr(signal, f"SIG{name}")),
            begins=True,
        )
        for name in ("KILL", "TERM")
        for when, commit in (
            ("in a run", lambda number: _in_a_run(number, lambda rank: time.sleep(20) if rank else collective())),
            ("while a worker starts", _while_a_worker_starts),
        )
    ),
    Fault("the process that workers are forked from is stopped in a run", _in_a_run(signal.SIGSTOP), begins=True),
]
