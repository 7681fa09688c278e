"""Findings about memory."""

import pytest

from cli.conftest import CGROUP, MOUNTS


@pytest.mark.parametrize("mounts", ["", MOUNTS.format(size=",size=8g")], ids=["unknown", "large"])
def test_other_shared_memory_is_clean(found, mounts):
    assert found(files={"/proc/self/mountinfo": CGROUP + mounts}) == []


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "99999999999999"])
def test_limit_that_limits_nothing_is_clean(found, limit):
    assert found(files={"/sys/fs/cgroup/memory.max": f"{limit}\n"}) == []
