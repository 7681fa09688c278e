"""Losses under nano_loop are held against the plain loop's, and what differs is an error."""

import math

import pytest
from command_line import OWN, run

from benchmarks.losses import difference


@pytest.mark.parametrize("workload", [f"{OWN}linear", "mlp"])
def test_fp32_has_the_losses_of_the_plain_loop(workload):
    done = run("benchmarks.losses", "--only", workload, "--small", "--steps", 20)
    assert done.returncode == 0, done.stderr
    assert f"| {workload} |" in done.stdout


def test_what_drifts_is_an_error():
    done = run("benchmarks.losses", "--only", f"{OWN}linear", "--system", f"{OWN}drifting", "--steps", 5)
    assert (done.returncode, done.stderr) == (1, f"off by more than 1e-05 and than rounding explains: {OWN}linear\n")


def test_what_fails_is_an_error_with_its_reason():
    done = run("benchmarks.losses", "--only", f"{OWN}linear", "--system", f"{OWN}failing")
    assert (done.returncode, "RuntimeError: this system is broken" in done.stderr) == (1, True)


def test_largest_difference_is_relative():
    assert difference([2.0, 4.0], [2.0, 4.5]) == 0.125
    assert difference([-2.0], [-1.0]) == 0.5


def test_what_is_no_number_is_the_largest_difference():
    assert math.isnan(difference([1.0, 1.0, 1.0], [1.0, math.nan, 2.0]))
