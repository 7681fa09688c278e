"""A Ray cluster of two nodes on this host, started once: each start takes ten seconds."""

import logging
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

import nano_loop

ROOT = Path(nano_loop.__file__).parents[1]
STORE = 100 << 20  # bytes, the least that Ray takes
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of a change to come
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",  # for the actors
    "PYTHONBREAKPOINT": "0",  # which Ray would set
}


@pytest.fixture(scope="session")
def environment():
    """What Ray's processes inherit."""
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def cluster(environment):
    """Two nodes, of two CPUs and of one; no process is connected to them."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    options = {"object_store_memory": STORE, "include_dashboard": False}
    config = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}  # Ray forgets a lost node sooner
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": config, **options})
    made.add_node(num_cpus=1, object_store_memory=STORE)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="session")
def connected(cluster):
    """This process is connected to the two nodes, by its own `ray.init`."""
    import ray

    ray.init(cluster.address, log_to_driver=True, logging_level=logging.WARNING)
    yield cluster
    ray.shutdown()
    os.environ.pop("RAY_CLIENT_MODE", None)


@pytest.fixture
def nothing_left_on_the_cluster(connected):
    """Fail a test after which there are actors, placement groups, folders, CPUs in use, or threads of ours."""
    yield
    deadline = time.monotonic() + 10  # Ray gives back a moment later
    while (left := _left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"the test left {left}"


def _left():
    import ray
    from ray.util.placement_group import placement_group_table

    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    groups = [each["name"] for each in placement_group_table().values() if each["state"] not in ("REMOVED", "FAILED")]
    used = ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("nano_loop")]
    folders = [str(path) for place in places for path in place.glob("nano_loop-[0-9]*-*") if _is_left(path)]
    found = {"groups": groups, "CPUs": used, "threads": threads, "folders": folders}
    return {name: what for name, what in found.items() if what}


def _is_left(path):
    """Whether a folder is this process's, or that of a process that has ended; others belong to other runs."""
    process = int(path.name.split("-")[1])
    return process == os.getpid() or not os.path.exists(f"/proc/{process}")
