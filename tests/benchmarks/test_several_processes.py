"""The benchmarks of several processes run, and refuse what is no count of rounds."""

import re

import pytest
from command_line import run


def test_start_of_two_processes_is_timed():
    done = run("benchmarks.processes", "--only", "start", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    for what in ("an import", "one process"):
        (seconds,) = re.findall(rf"start of two processes, over {what}: (-?\d+\.\d\d) s \(median of 1\)", done.stdout)
        assert -10 < float(seconds) < 100  # of one round, in which a process of the other side may have been disturbed


def test_a_cross_validation_is_timed_by_calls_of_each_length():
    done = run("benchmarks.processes", "--only", "calls", "--rounds", 1, "--rows", 320, "--epochs", 2)
    assert done.returncode == 0, done.stderr
    assert "5 folds of 2 epochs over 320 rows, two processes, seconds" in done.stdout
    for way in ("one call", "a call a fold", "a call an epoch"):
        (ratio,) = re.findall(rf"^  {way} .* (\d+\.\d+)× \(", done.stdout, re.MULTILINE)
        assert float(ratio) > 0


@pytest.mark.slow
def test_averaging_is_timed_by_each_way():
    done = run("benchmarks.averaging", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    for way in ("shared memory", "process group", "gloo all_reduce"):
        assert len(re.findall(rf"^  .*{way}.* \d+\.\d\d", done.stdout, re.MULTILINE)) == 2, done.stdout


@pytest.mark.parametrize("module", ["benchmarks.processes", "benchmarks.averaging"])
def test_no_rounds_are_refused(module):
    done = run(module, "--rounds", 0)
    assert (done.returncode, "'0': a whole number, 1 or more" in done.stderr) == (2, True)
