import re

import pytest

from .running import run


@pytest.mark.slow
def test_both_runs_are_compared_and_their_progress_is_shown():
    process = run("demo.py", "--width", 8, "--epochs", 1)
    assert process.returncode == 0, process.stderr
    assert re.search(r"plain +\d+\.\d s +\d+\.\d s +\d+\.\d\d%", process.stdout)
    assert re.search(r"nano_loop +\d+\.\d s +\d+\.\d s +\d+\.\d\d%", process.stdout)
    assert re.search(r"speed-up +\d+\.\d\d× +\d+\.\d\d×", process.stdout)
    assert process.stderr.count("23/23") >= 2


@pytest.mark.slow
def test_a_failed_run_fails_the_demo_with_its_message_and_exit_code():
    process = run("demo.py", "--epochs", "many")
    assert process.returncode == 2
    assert "invalid int value: 'many'" in process.stderr
