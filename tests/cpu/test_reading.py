"""Reading a machine: the allowed CPUs, the live machine, and file trees that no kernel wrote."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_loop.cpu import read_machine, reading

READ_FILES = [
    "proc/cpuinfo",
    "proc/self/cgroup",
    "proc/self/mountinfo",
    "proc/sys/kernel/arch",
    "sys/devices/cpu_atom/cpus",
    "sys/devices/cpu_core/cpus",
    "sys/devices/system/cpu/cpu0/cache/index0/level",
    "sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list",
    "sys/devices/system/cpu/cpu0/cpu_capacity",
    "sys/devices/system/cpu/cpu0/topology/core_id",
    "sys/devices/system/cpu/cpu0/topology/physical_package_id",
    "sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
    "sys/devices/system/cpu/cpu1/cpu_capacity",
    "sys/devices/system/cpu/online",
    "sys/devices/system/node/node0/cpulist",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us",
    "sys/fs/cgroup/cpuset.cpus.effective",
]
TRICKY = [
    b"",
    b"0",
    b"-1",
    b"0-3",
    b"0-4294967295",
    b"9" * 5000,
    b"1 0",
    b"max",
    b"0::/../..\n",
    b"1:cpu:/\x00\n",
    b": : :\n",
    b"processor : 0\nflags :\n\nprocessor : x\n",
    b"processor\t: 7\n",
    b"1 2 3 / /sys/\x00 - cgroup2 a b\n",
    b"1 2 3 relative /sys/fs/cgroup - cgroup2 a b\n",
]
contents = st.one_of(st.binary(max_size=64), st.sampled_from(TRICKY))


def assert_consistent(machine):
    ids = [cpu.id for cpu in machine.logical_cpus]
    assert ids == sorted(set(ids))
    assert machine.allowed
    assert set(machine.allowed) <= set(ids)
    cores = [cpu for core in machine.physical_cores for cpu in core]
    assert sorted(cores) == list(machine.allowed)
    assert 1 <= machine.num_threads <= len(machine.physical_cores)
    assert machine.name
    assert machine.architecture
    machine.as_dict()


def test_the_live_machine_reads_consistently():
    machine = read_machine()
    assert_consistent(machine)
    if hasattr(os, "sched_getaffinity"):
        assert set(machine.allowed) <= os.sched_getaffinity(0)


def test_system_without_masks_is_counted_by_psutil(monkeypatch):
    monkeypatch.delattr(reading.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else None)
    assert reading.live_host().cores == 8


@pytest.mark.parametrize("root", ["nothing here", "null\0byte"])
def test_an_empty_tree_is_one_cpu(tmp_path, root):
    machine = read_machine(tmp_path / root)
    assert (machine.name, machine.architecture, machine.num_threads) == ("unknown", "unknown", 1)
    assert_consistent(machine)


@pytest.mark.parametrize("path", READ_FILES)
def test_a_folder_in_place_of_a_file_does_no_harm(recorded, path):
    root = recorded("core_i7_1260p")
    (root / path).unlink(missing_ok=True)
    (root / path).mkdir(parents=True)
    assert_consistent(read_machine(root))


@given(st.dictionaries(st.sampled_from(READ_FILES), contents))
def test_garbage_never_raises(files):
    with tempfile.TemporaryDirectory() as root:
        for path, content in files.items():
            file = Path(root, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        assert_consistent(read_machine(root))
