"""A Ray cluster of two nodes on this host, started only once because a start takes ten seconds."""

import logging
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

import nano_loop

ROOT = Path(nano_loop.__file__).parents[1]
STORE = 100 << 20  # in bytes, Ray's minimum
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # avoids Ray's warning about a future change
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",  # for the actors
    "PYTHONBREAKPOINT": "0",  # Ray would set this
}


@pytest.fixture(scope="session")
def environment():
    """Return the environment of Ray's processes."""
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def cluster(environment):
    """A cluster of a node with two CPUs and one with one CPU; no process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    options = {"object_store_memory": STORE, "include_dashboard": False}
    config = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}  # detects a lost node sooner
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": config, **options})
    made.add_node(num_cpus=1, object_store_memory=STORE)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="session")
def connected(cluster):
    """Connect this process to the two nodes with `ray.init`."""
    import ray

    ray.init(cluster.address, log_to_driver=True, logging_level=logging.WARNING)
    yield cluster
    ray.shutdown()
    os.environ.pop("RAY_CLIENT_MODE", None)


@pytest.fixture
def nothing_left_on_the_cluster(connected):
    """Fail a test that leaves actors, placement groups, folders, CPUs in use, or threads of nano_loop."""
    yield
    deadline = time.monotonic() + 10  # Ray releases them a moment later
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
    """Whether a folder belongs to this process or to one that has exited; others belong to other runs."""
    process = int(path.name.split("-")[1])
    return process == os.getpid() or not os.path.exists(f"/proc/{process}")
