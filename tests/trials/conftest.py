"""What tests of searches need: a cache of their own, and the process that forks the trials ended with the test."""

import pytest

from nano_loop.distributed.launch.local.kept_server import end_kept


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    end_kept()
