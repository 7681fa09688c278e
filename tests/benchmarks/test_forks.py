"""Jobs run in fresh processes and in forks of one, whatever happens to them."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import OWN

from benchmarks.forks import forks
from benchmarks.fresh import fresh


def job(system):
    return {"task": "steps", "workload": f"{OWN}linear", "system": f"{OWN}{system}", "small": True}


@pytest.mark.parametrize("way", [forks, lambda: nullcontext(fresh)], ids=["forks", "fresh"])
def test_jobs_are_done_one_after_another_whatever_becomes_of_them(way):
    """The output of a system is not mistaken for its result, and its files are removed with it."""
    with way() as run:
        assert run(job("chatty"), limit=60)["median_ms"] > 0
        assert run(job("failing"), limit=60) == {"reason": "RuntimeError: this system is broken"}
        assert run(job("dying"), limit=60)["reason"].startswith("killed by SIGSEGV")
        assert run(job("endless"), limit=6) == {"reason": "it took more than 6 s"}
        _, _, folder = run(job("littering"), limit=60)["reason"].partition(": ")
        assert folder.startswith("/")
        assert not Path(folder).exists()
        assert run(job("chatty"), limit=60)["peak_rss_mb"] > 0


@pytest.mark.parametrize("gone", [False, True])
def test_a_dead_parent_of_forks_is_a_reason_and_no_hang(gone):
    with forks() as run:
        run.args[0].kill()
        if gone:  # the reader is gone
            run.args[0].wait()
        assert run(job("chatty"), limit=60) == {"reason": "killed by SIGKILL"}
