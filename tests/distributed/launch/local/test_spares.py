"""Workers that are forked ahead: the next run finds them, and they are as clean as those that are not."""

import functools
import importlib
import os
import signal
import sys

import psutil
import pytest
import torch

from distributed import small
from distributed.launch.local.test_server import everywhere, is_gone, kept, run, wait_until
from nano_loop import NanoWorkerError
from nano_loop.distributed.launch.local import kept_server as servers
from nano_loop.distributed.launch.local import start
from nano_loop.distributed.launch.local.spares import Spares
from nano_loop.options import Options

pytestmark = pytest.mark.usefixtures("nothing_left")


def waiting(count=1):
    """Return the processes that wait to be workers, once there are so many."""
    wait_until(lambda: len(children()) == count)
    return children()


def children():
    return {each.pid for each in psutil.Process(kept().pid).children()}


def worker(**options):
    return run(os.getpid, **options)[1]


def test_worker_of_the_next_run_is_the_process_that_waits():
    first = worker()
    (spare,) = waiting()
    assert spare != first
    assert worker() == spare
    assert waiting() != {spare}


def says_what_it_was_given(wait):
    path, streams = wait.until_needed()
    os.write(streams[0], path.encode())
    os._exit(0)


def test_each_is_taken_once_and_others_are_forked_by_the_run():
    spares, (reading, writing) = Spares(), os.pipe()
    spares.expected = 2
    while spares.are_missing:
        spares.fork(says_what_it_was_given)
    waiting = set(spares.processes)
    taken = [spares.take(path, [writing]) for path in ("one", "two", "three")]
    os.close(writing)
    for pid in waiting:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with open(reading) as said:
        assert said.read() in ("onetwo", "twoone")
    assert {*taken[:2]} == waiting
    assert taken[2] is None


def test_those_that_nobody_needs_end_with_the_process_that_forked_them():
    spares = Spares()
    spares.fork(says_what_it_was_given)
    (pid,) = spares.processes
    spares.leave()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def rests(pid):
    """Whether a process uses no CPU for a while."""
    before = psutil.Process(pid).cpu_times()
    wait_a_little()
    return psutil.Process(pid).cpu_times() == before


def test_processes_that_wait_use_no_cpu_and_the_spare_ends_with_the_one_that_forked_it():
    worker()
    (spare,) = waiting()
    wait_until(lambda: rests(spare) and rests(kept().pid))
    assert psutil.Process(spare).status() == psutil.STATUS_SLEEPING
    servers.end_kept()
    wait_until(lambda: is_gone(spare))


def wait_a_little():
    signal.sigtimedwait([], 0.2)


def test_what_it_did_while_it_waited_is_not_seen_in_the_run():
    def state():
        return {
            "random": torch.random.get_rng_state().sum().item(),
            "hooks": [hook for hook in vars(torch.nn.modules.module) if hook.startswith("_global") and
                      getattr(torch.nn.modules.module, hook)],
            "call": torch.nn.Module.__call__.__qualname__,
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "group": os.getpgid(0) == os.getpid(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warnings": len(__import__("warnings").filters),
            "modules": [each for each in sorted(sys.modules) if not each.startswith("torch.")],
        }  # fmt: skip

    importlib.import_module("torch._dynamo")  # as optimizers do, without which it does not do its run
    servers.end_kept()
    forked_for_the_run = run(state)[1]
    (spare,) = waiting()
    wait_until(lambda: rests(spare))  # it has done its run
    found = run(lambda: (state(), os.getpid()))[1]
    assert found == (forked_for_the_run, spare)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("NANO_LOOP_NUM_PROCESSES", "2"), ("NANO_LOOP_LOG_CASTS", "casts.json"), ("NANO_LOOP_FASTER", "yes")],
)
def test_what_waits_ignores_options_in_the_environment(monkeypatch, tmp_path, variable, text):
    importlib.import_module("torch._dynamo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, text)
    servers.end_kept()
    monkeypatch.setattr(Options, "from_call", functools.partial(Options.from_call, environ={}))  # of this process
    worker()
    (spare,) = waiting()
    wait_until(lambda: rests(spare))  # it has done its run
    assert worker() == spare
    assert not any(tmp_path.iterdir())


def test_one_that_was_killed_is_not_missed():
    worker()
    (spare,) = waiting()
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: is_gone(spare))
    assert worker() != spare


def test_one_that_is_stopped_is_reported_as_a_worker_that_does_not_start():
    worker()
    (spare,) = waiting()
    os.kill(spare, signal.SIGSTOP)
    with pytest.raises(NanoWorkerError, match="rank 1 did not start within 1 s"):
        worker(timeout=1)
    assert worker() != spare


def test_one_that_lacks_what_has_been_imported_since_ends(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    worker()
    (spare,) = waiting()
    server = kept().pid
    monkeypatch.setattr(start, "ALL_MODULES", ("imported_late",))
    __import__("imported_late")
    try:
        pid, is_there = run(lambda: (os.getpid(), "imported_late" in sys.modules))[1]
    finally:
        del sys.modules["imported_late"]
    assert is_there
    assert pid != spare
    assert is_gone(spare)
    assert kept().pid == server


def test_failed_run_leaves_one_for_the_next(capfd):
    def fail():
        if small.rank() == 1:
            raise ZeroDivisionError
        everywhere(0)

    with pytest.raises(NanoWorkerError):
        run(fail)
    (spare,) = waiting()
    assert worker() == spare


def test_environment_and_working_folder_are_those_of_the_call(tmp_path, monkeypatch):
    worker()
    waiting()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["another.py"])
    assert (
        run(lambda: (os.getcwd(), os.environ["PWD"], sys.argv)) == [(str(tmp_path), str(tmp_path), ["another.py"])] * 2
    )
