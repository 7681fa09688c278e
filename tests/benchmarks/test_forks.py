from pathlib import Path

import pytest
from command_line import OWN

from benchmarks.forks import forks


def job(system):
    return {"task": "steps", "workload": f"{OWN}linear", "system": f"{OWN}{system}", "small": True}


@pytest.fixture(scope="module")
def run():
    with forks() as run:
        yield run


def test_jobs_are_done_one_after_another_whatever_becomes_of_them(run):
    assert run(job("chatty"), limit=60)["median_ms"] > 0
    assert run(job("failing"), limit=60) == {"reason": "RuntimeError: this system is broken"}
    assert run(job("dying"), limit=60) == {"reason": "killed by SIGSEGV"}
    assert run(job("endless"), limit=1) == {"reason": "it took more than 1 s"}
    assert run(job("chatty"), limit=60)["peak_rss_mb"] > 0


def test_the_files_of_a_case_go_with_it(run):
    _, _, folder = run(job("littering"), limit=60)["reason"].partition(": ")
    assert folder.startswith("/")
    assert not Path(folder).exists()


@pytest.mark.parametrize("gone", [False, True])
def test_a_dead_parent_of_forks_is_a_reason_and_no_hang(gone):
    with forks() as run:
        run.args[0].kill()
        if gone:  # there is nobody any more who could be written to
            run.args[0].wait()
        assert run(job("chatty"), limit=60) == {"reason": "killed by SIGKILL"}
