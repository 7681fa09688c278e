"""The process that forks workers is kept for the next run, replaced if it does not fit, and never in the way."""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from distributed import small
from distributed.launch.started import LOOP, environment
from nano_loop import nano
from nano_loop.distributed.launch_local import server as servers

pytestmark = pytest.mark.usefixtures("nothing_left")


def run(task, **options):
    def train(model):
        return small.everywhere(task())

    return nano(**small.OPTIONS | options)(train)(torch.nn.Linear(1, 1))


def server_of_a_run():
    """Return the process that forked the run's worker."""
    parent = run(os.getppid)[1]
    assert parent == kept().pid
    return parent


def kept():
    (server,) = servers.kept
    return server


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.01)


def is_gone(process):
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_next_run_is_forked_from_the_same_process_which_is_no_child_and_meets_nothing_of_the_first():
    def leave_something():
        torch.left = "by the first run"
        os.environ["LEFT"] = "too"
        torch.set_default_dtype(torch.float64)

    def what_is_there():
        return hasattr(torch, "left"), os.environ.get("LEFT"), str(torch.get_default_dtype())

    try:
        first = server_of_a_run()
        run(leave_something)
    finally:
        del torch.left, os.environ["LEFT"]  # set in this process, which is rank 0
        torch.set_default_dtype(torch.float32)
    assert run(what_is_there)[1] == (False, None, "torch.float32")
    assert first == kept().pid not in {child.pid for child in psutil.Process().children(recursive=True)}


def test_folders_arguments_and_volatile_variables_are_those_of_the_call(tmp_path, monkeypatch):
    first = server_of_a_run()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["another.py"])
    state = run(lambda: (os.getcwd(), os.environ["PWD"], sys.argv, tempfile.gettempdir()))
    assert state == [(str(tmp_path), str(tmp_path), ["another.py"], tempfile.gettempdir())] * 2
    assert kept().pid == first


def test_it_is_replaced_where_the_environment_is_another_and_workers_have_the_present_one(monkeypatch):
    first = server_of_a_run()
    monkeypatch.setenv("SOMETHING", "new")
    assert run(lambda: os.environ["SOMETHING"]) == ["new", "new"]
    assert kept().pid != first
    assert is_gone(first)


@pytest.mark.slow
def test_it_ends_by_itself_without_runs_and_the_next_run_starts_another(monkeypatch):
    servers.end_kept()
    monkeypatch.setattr(servers, "IDLE", 0.2)
    first = server_of_a_run()
    wait_until(lambda: is_gone(first))
    assert server_of_a_run() != first
    servers.end_kept()  # would otherwise expire during the next test


EARLY = """
from nano_loop.distributed.launch_local import server as servers
def server():
    return next(iter(servers.kept), None)
def train(model):
    return os.getpid()
train.__module__ = "a_module"
nano(**OPTIONS)(train)
assert server() is None, "started for a module"
train.__module__ = "__main__"
nano(**OPTIONS | {"num_processes": 1})(train)
nano(train)
assert server() is None, "started for one process"
train = nano(**OPTIONS)(train)
started = server()
nano(**OPTIONS)(train.__wrapped__)
assert server() is started, "started twice"
assert not started.ready, "waited for"
assert train(Line()) == os.getpid()
assert server() is started, "not used"
class MyNano(TorchNano):
    def train(self, model): ...
servers.end_kept()
MyNano(**OPTIONS)
os.environ["ANOTHER"] = "environment"
train(Line())
second = server()
servers.end_kept()
nano(**OPTIONS)(train.__wrapped__)  # which ends while it imports
print(started.pid, second.pid)
"""


@pytest.mark.slow
def test_script_starts_it_when_it_decorates_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", LOOP + EARLY]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(int, done.stdout.split())
    assert first != second
    wait_until(lambda: is_gone(first) and is_gone(second))


@pytest.mark.slow
def test_what_an_import_makes_in_the_temporary_folder_goes_with_the_run(tmp_path, monkeypatch):
    # The worker gets the caller's value of a module attribute, but memory of C code stays its own.
    (tmp_path / "makes_a_folder.py").write_text("""
import ctypes, tempfile
place = ctypes.c_char_p(tempfile.mkdtemp().encode())
def made():
    return place.value.decode()
""")
    monkeypatch.syspath_prepend(tmp_path)
    mine, place = run(importlib.import_module("makes_a_folder").made)
    del sys.modules["makes_a_folder"]
    os.rmdir(mine)
    assert place != mine
    assert not Path(place).exists()
