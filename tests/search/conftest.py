"""What tests of searches need: a cache of their own, and the process that forks the trials ended with the test."""

import pytest

from nano_loop.distributed.launch_local.kept_server import end_kept
from nano_loop.search import search


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(search, "load_of", lambda cpus: 0.0)  # tests run beside others
    yield tmp_path / "cache"
    end_kept()


@pytest.fixture
def only(monkeypatch):
    """Give a function that says which candidates there are; at first none."""

    def only(*changes):
        monkeypatch.setattr(search, "candidates", lambda *_: list(changes))

    only()
    return only
