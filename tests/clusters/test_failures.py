"""If a rank ends on a Ray cluster, an error names rank, node and cause, and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
from distributed import small

import nano_loop
from clusters.nodes import OPTIONS, apart, on_ray, processes_of
from nano_loop import NanoConfigError, NanoError, NanoWorkerError, nano

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("connected", "nothing_left_on_the_cluster")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 10.0  # seconds until the exit of a process is detected
LATEST = 30.0  # seconds until the loss of a node is detected
FAILED = f"/dev/shm/nano_loop-test-failed-{os.getpid()}"  # real on every rank


@pytest.fixture(autouse=True)
def no_failure_yet():
    """Remove the mark of an earlier failure."""
    yield
    Path(FAILED).unlink(missing_ok=True)


def failing(fail, rank=1):
    """Return a loop in which one rank fails after some steps, and the others continue."""

    def loop(model, optimizer, loader):
        small.fit(model, optimizer, loader, epochs=1)
        if nano_loop.global_rank() == rank:
            Path(FAILED).touch()
            fail()
        small.fit(model, optimizer, loader)

    return loop


def refused(loop, kind=NanoWorkerError, **options):
    """Return the error of a run, raised soon after the failure."""
    with pytest.raises(kind) as caught:
        on_ray(loop, **options)
    if os.path.exists(FAILED):
        assert time.time() - os.stat(FAILED).st_mtime < SOON + options.get("timeout", 0)
    return caught.value


def raise_in_the_loop():
    raise ValueError("bad batch")


@pytest.mark.parametrize("hosts", [1, 2])
def test_exception_of_a_rank_is_the_cause_and_names_its_node(hosts):
    error = refused(failing(raise_in_the_loop, rank=2), worker_init=apart if hosts == 2 else None)
    assert str(error).startswith("rank 2 on node ")
    assert ") raised ValueError: bad batch: a run needs all of its ranks. Fix the error in its traceback." in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert "raise_in_the_loop" in error.traceback
    assert error.rank == 2


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV, "exit"])
def test_process_that_ends_is_known_at_once(end):
    def fail():
        os._exit(3) if end == "exit" else os.kill(os.getpid(), end)

    error = refused(failing(fail), num_processes=2)
    assert str(error).startswith("rank 1 on node ")
    assert "ended its process: a run needs all of its ranks. See its standard error" in str(error)
    assert "Ray says: The actor died unexpectedly" in str(error)
    assert (error.rank, error.exitcode) == (1, None)
    assert os.path.exists(FAILED)


def test_sys_exit_of_a_rank_is_told():
    error = refused(failing(lambda: sys.exit(3)), num_processes=2)
    assert ") called sys.exit(3): a run needs all of its ranks. Return from the loop on every rank" in str(error)
    assert error.exitcode == 3


def test_lost_node_is_known_within_half_a_minute(connected, tmp_path):
    node = connected.add_node(num_cpus=1, object_store_memory=100 << 20)
    connected.wait_for_nodes()
    lost_at = []

    def lose():
        while not (tmp_path / "training").exists():
            time.sleep(0.05)
        lost_at.append(time.monotonic())
        connected.remove_node(node, allow_graceful=False)

    here = str(tmp_path / "training")

    def loop(model, optimizer, loader):
        small.fit(model, optimizer, loader, epochs=1)
        if nano_loop.global_rank() == 0:
            open(here, "w").close()
        for _ in range(1000):
            small.fit(model, optimizer, loader, epochs=1)
            time.sleep(0.02)

    thread = threading.Thread(target=lose)
    thread.start()
    error = refused(loop, num_processes=4, worker_init=apart)
    known_at = time.monotonic()
    thread.join()
    assert f"rank 3 on node {node.node_ip_address}" in str(error) or f"rank 2 on node {node.node_ip_address}" in str(
        error
    )
    assert "ended" in str(error)
    assert known_at - lost_at[0] < LATEST


def test_exception_of_rank_0_is_raised_as_it_is():
    def fail():
        raise KeyError("mine")

    assert refused(failing(fail, rank=0), KeyError).args == ("mine",)
    assert ray.is_initialized()  # initialized by the caller


def test_interrupt_ends_the_run():
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    refused(failing(interrupt, rank=0), KeyboardInterrupt)
    assert on_ray(small.fit, num_processes=2)[0] == 8  # the cluster itself was not interrupted


KILLED = """
import os, sys, time
import ray
from clusters.nodes import OPTIONS, apart
from distributed import small
import nano_loop
ray.init(sys.argv[1], log_to_driver=False)
options = OPTIONS | ({"worker_init": apart} if sys.argv[2] == "2" else {})
def loop(model, optimizer, loader):
    small.fit(model, optimizer, loader)
    processes = [nano_loop.broadcast(os.getpid(), rank) for rank in range(nano_loop.world_size())]
    if nano_loop.global_rank() == 0:
        print(*processes, flush=True)
    while True:
        small.fit(model, optimizer, loader)
nano_loop.nano(**options)(loop)(*small.parts())
"""


@pytest.mark.parametrize("hosts", [1, 2])
def test_actors_and_folders_go_with_a_caller_that_is_killed(connected, hosts):
    command = [sys.executable, "-c", KILLED, connected.address, str(hosts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        processes = [int(each) for each in caller.stdout.readline().split()]
        caller.kill()
    assert len(processes) == 3
    deadline = time.monotonic() + SOON
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, processes))


def is_alive(process):
    return os.path.exists(f"/proc/{process}")


def test_file_that_is_not_on_every_node_is_an_error_that_says_so():
    error = refused(failing(lambda: torch.load("/nowhere/data.pt")), num_processes=2)
    assert "raised FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/data.pt'" in str(error)
    assert "Put files that all ranks read on a path that all nodes share, such as NFS" in str(error)


def test_rank_that_is_late_is_named_with_the_line_that_it_is_in():
    def sleep():
        time.sleep(60)

    # On a busy machine, joining may take some seconds.
    error = refused(failing(sleep, rank=2), timeout=12, worker_init=apart)
    assert re.match("rank [01] has waited 12 seconds", str(error))  # the first one to wait reports it
    assert "time.sleep(60)" in str(error)


BROKEN = """
import sys
import ray
from clusters.nodes import OPTIONS
from distributed import small
import nano_loop
ray.init(sys.argv[1], runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
try:
    nano_loop.nano(**OPTIONS)(small.fit)(*small.parts())
except nano_loop.NanoError as error:
    print(error)
"""


def test_node_without_nano_loop_is_an_error_that_names_runtime_env(connected, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nano_loop'] = None")
    code, out, err = processes_of([sys.executable, "-c", BROKEN, connected.address, str(tmp_path)])
    assert code == 0, err
    assert re.search(r"rank [12] on node .* could not import nano_loop \(", out)  # the first one to report it
    assert "Every node needs the same Python environment as the caller's: install it there" in out
    assert 'ray.init(runtime_env={"working_dir": ".", "py_modules": [...]})' in out


def test_other_versions_on_a_node_are_refused(monkeypatch):
    from nano_loop.distributed.launch_ray import worker

    monkeypatch.setattr(worker, "__version__", "0.0.1")
    error = refused(small.fit, NanoError, num_processes=2)
    assert f") has nano_loop {nano_loop.__version__}, but the caller has 0.0.1: a run needs all" in str(error)
    assert "Give every node the same Python environment" in str(error)


def test_cpus_in_use_are_an_error_that_lists_what_is_free():
    @ray.remote(num_cpus=1)
    class Taken:
        def here(self):
            return True

    taken = [Taken.remote() for _ in range(3)]
    ray.get([each.here.remote() for each in taken])
    error = refused(small.fit, NanoError, num_processes=2, timeout=2)
    for each in taken:
        ray.kill(each)
    got, expected = "2 × 1 CPUs were not free within 2 s", "rank 0 must be on this node; available: 0 CPUs on"
    assert str(error).startswith(f"{got}: {expected}")
    assert "End other jobs, request fewer CPUs, or pass a longer timeout." in str(error)


def test_ray_client_is_refused(monkeypatch):
    from nano_loop.distributed.launch_ray import cluster

    monkeypatch.setattr(cluster.client.ray, "is_connected", lambda: True)
    error = refused(small.fit, NanoConfigError)
    assert "connected through Ray Client (ray://): the caller is rank 0, so it must run on a node" in str(error)


def test_missing_and_old_ray_are_import_errors(monkeypatch):
    import importlib.metadata
    import importlib.util

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.49.1")
    with pytest.raises(
        ImportError, match=r'with Ray 2.49.1: Ray 2.51 or later is required. .* pip install "ray>=2.51"'
    ):
        nano(**OPTIONS)(small.fit)(*small.parts())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"distributed_backend='ray': Ray is not installed. Install it: pip install"):
        nano(**OPTIONS)(small.fit)(*small.parts())
