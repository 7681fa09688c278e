"""Findings about memory."""

import pytest

from cli.conftest import CGROUP, MOUNTS


def test_dockers_default_size_of_shared_memory_hurts(only):
    finding = only(files={"/proc/self/mountinfo": CGROUP + MOUNTS.format(size=",size=65536k")})
    assert (finding.id, finding.hurts) == ("shared-memory", True)
    assert "64 MiB" in finding.what
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize("mounts", ["", MOUNTS.format(size=",size=8g")], ids=["unknown", "large"])
def test_other_shared_memory_is_clean(found, mounts):
    assert found(files={"/proc/self/mountinfo": CGROUP + mounts}) == []


def test_little_available_memory_hurts(only):
    finding = only(files={"/proc/meminfo": "MemTotal:  65859580 kB\nMemAvailable:  2000000 kB\n"})
    assert (finding.id, finding.hurts) == ("memory-short", True)
    assert "1.9 GiB of 62.8 GiB" in finding.what


def test_limit_of_the_cgroup_is_a_note(only):
    finding = only(files={"/sys/fs/cgroup/memory.max": "8589934592\n"})
    assert (finding.id, finding.hurts) == ("memory-limit", False)
    assert "8.0 GiB, and the machine has 62.8 GiB" in finding.what


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "99999999999999"])
def test_limit_that_limits_nothing_is_clean(found, limit):
    assert found(files={"/sys/fs/cgroup/memory.max": f"{limit}\n"}) == []


def test_unknown_memory_is_no_finding(found):
    assert found(files={"/proc/meminfo": "damaged"}) == []
