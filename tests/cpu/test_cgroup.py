"""Quotas and cpusets: both cgroup versions, every ancestor, inside containers and out."""

import pytest

from nano_loop.cpu.cgroup import read_cpuset, read_quota
from nano_loop.cpu.tree import Tree

V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


@pytest.mark.parametrize(
    ("machine", "quota"),
    [
        ("docker_quota_v2", 2.5),
        ("docker_quota_v1", 3.0),
        ("systemd_nested_quota", 4.0),
        ("kubernetes_cpuset", 8.0),
        ("xeon_4309y_two_sockets", None),
        ("epyc_9v74_azure", None),
        ("graviton3", None),
    ],
)
def test_the_quota_of_a_recorded_machine_is_read(recorded, machine, quota):
    assert read_quota(Tree(recorded(machine))) == quota


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("250000 100000\n", 2.5),
        ("50000 100000\n", 0.5),
        ("100000 50000\n", 2.0),
        ("300000\n", 3.0),
        ("max 100000\n", None),
        ("max\n", None),
        ("0 100000\n", None),
        ("-5 100000\n", None),
        ("100000 0\n", 1.0),
        ("100000 -1\n", None),
        ("99999999999999999999 100000\n", None),
        ("much\n", None),
        ("\n", None),
    ],
)
def test_cpu_max_is_a_share_of_its_period(planted, text, quota):
    root = planted({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": text})
    assert read_quota(Tree(root)) == quota


@pytest.mark.parametrize(("text", "quota"), [("250000\n", 2.5), ("-1\n", None), ("", None)])
def test_version_1_reads_quota_and_period_from_two_files(planted, text, quota):
    root = planted(
        {
            "/proc/self/cgroup": "4:cpu,cpuacct:/\n",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": text,
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert read_quota(Tree(root)) == quota


def test_the_smallest_quota_of_all_version_1_ancestors_counts(planted):
    cpu = "/sys/fs/cgroup/cpu"
    root = planted(
        {
            "/proc/self/cgroup": "3:cpuset:/\n1:cpu:/slurm/job_7/step_0\n0::/\n",
            "/proc/self/mountinfo": V1_MOUNTS,
            f"{cpu}/cpu.cfs_quota_us": "-1\n",
            f"{cpu}/slurm/cpu.cfs_quota_us": "800000\n",
            f"{cpu}/slurm/job_7/cpu.cfs_quota_us": "200000\n",
            f"{cpu}/slurm/job_7/step_0/cpu.cfs_quota_us": "600000\n",
        }
    )
    assert read_quota(Tree(root)) == 2.0


def test_a_neighbours_quota_does_not_count(planted):
    root = planted(
        {
            "/proc/self/cgroup": "0::/mine\n",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/mine/cpu.max": "400000 100000\n",
            "/sys/fs/cgroup/yours/cpu.max": "100000 100000\n",
            "/sys/fs/cgroup/mine/child/cpu.max": "100000 100000\n",
        }
    )
    assert read_quota(Tree(root)) == 4.0


def test_a_mixed_machine_has_its_quota_in_version_1(planted):
    root = planted(
        {
            "/proc/self/cgroup": "3:cpuset:/pod\n1:cpu:/pod\n0::/init.scope\n",
            "/proc/self/mountinfo": V1_MOUNTS,
            "/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "150000\n",
            "/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "50000\n",
            "/sys/fs/cgroup/unified/init.scope/cgroup.controllers": "\n",
        }
    )
    assert read_quota(Tree(root)) == 3.0


def test_a_process_deeper_in_its_container_is_found(planted):
    root = planted(
        {
            "/proc/self/cgroup": "4:cpu:/docker/ab12/worker\n",
            "/proc/self/mountinfo": "9 8 0:37 /docker/ab12 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "/sys/fs/cgroup/cpu/worker/cpu.cfs_quota_us": "100000\n",
        }
    )
    assert read_quota(Tree(root)) == 1.0


def test_a_container_without_mountinfo_finds_its_files_where_the_mount_starts(planted):
    root = planted({"/proc/self/cgroup": "0::/docker/ab12\n", "/sys/fs/cgroup/cpu.max": "200000 100000\n"})
    assert read_quota(Tree(root)) == 2.0


def test_a_cgroup_outside_of_the_namespace_does_not_lead_out_of_the_root(planted):
    root = planted(
        {
            "machine/proc/self/cgroup": "0::/../../../../outside\n",
            "machine/sys/fs/cgroup/cpu.max": "max 100000\n",
            "outside/cpu.max": "100000 100000\n",
        }
    )
    assert read_quota(Tree(root / "machine")) is None


@pytest.mark.parametrize(
    ("machine", "cpus"),
    [
        ("kubernetes_cpuset", (4, 5, 6, 7, 20, 21, 22, 23)),
        ("docker_quota_v1", tuple(range(32))),
        ("graviton3", ()),
    ],
)
def test_the_cpuset_of_a_recorded_machine_is_read(recorded, machine, cpus):
    assert read_cpuset(Tree(recorded(machine))) == cpus


def test_a_cgroup_without_a_cpuset_has_its_parents(planted):
    root = planted(
        {
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/b/cpuset.cpus": "\n",
            "/sys/fs/cgroup/a/cpuset.cpus.effective": "2-3\n",
            "/sys/fs/cgroup/cpuset.cpus.effective": "0-7\n",
        }
    )
    assert read_cpuset(Tree(root)) == (2, 3)
