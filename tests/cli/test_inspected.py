"""What is read of a machine, of recorded files and of the live one."""

import os

import pytest
import torch

from cli.conftest import CGROUP, MOUNTS
from nano_loop.cli.inspected import Memory, inspect_system, installed
from nano_loop.version import __version__


@pytest.mark.parametrize(
    ("size", "expected"),
    [("65536k", 64 << 20), ("8g", 8 << 30), ("1m", 1 << 20), ("4096", 4096)],
)
def test_size_of_shared_memory_is_read_in_each_unit(inspect, size, expected):
    mounts = MOUNTS.format(size=f",mode=755,size={size},inode64")
    assert inspect(files={"/proc/self/mountinfo": CGROUP + mounts}).memory.shared == expected


def test_last_mount_at_a_place_is_the_one_that_is_seen(inspect):
    mounts = MOUNTS.format(size=",size=1g") + MOUNTS.format(size=",size=2g")
    assert inspect(files={"/proc/self/mountinfo": CGROUP + mounts}).memory.shared == 2 << 30


def test_limits_of_both_versions_of_cgroups_are_read(inspect):
    version_1 = {
        "/proc/self/cgroup": "4:memory:/docker/ab12\n",
        "/proc/self/mountinfo": "35 31 0:32 /docker/ab12 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
    }
    assert inspect(files=version_1).memory.limit == 1 << 30


def test_smallest_limit_of_the_cgroups_above_counts(inspect):
    folder = "/sys/fs/cgroup/system.slice"
    files = {f"{folder}/memory.max": "1073741824\n", f"{folder}/training.service/memory.max": "2147483648\n"}
    assert inspect(files=files).memory.limit == 1 << 30


def test_machine_without_files_is_unknown_and_raises_nothing(tmp_path):
    inspected = inspect_system(tmp_path, {})
    assert inspected.memory == Memory()
    assert inspected.libraries == ()


def test_live_machine_is_read():
    inspected = inspect_system()
    assert len(inspected.machine.logical_cpus) >= 1
    assert inspected.environ is os.environ
    assert inspected.torch == {}


def test_installed_packages_are_found_by_their_metadata():
    found = installed()
    assert found["nano-loop"] == __version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_libraries_of_a_process_with_torch_take_the_place_of_this_process(inspect, tmp_path):
    said = {"maps": "7f00-7f01 r-xp 0 08:01 1 /site/libgomp-a.so.1\n", "onednn": "3.12.0"}
    inspected = inspect_system(tmp_path, {}, torch=said)
    assert inspected.libraries == ("/site/libgomp-a.so.1",)
    assert inspected.torch == {"onednn": "3.12.0"}
