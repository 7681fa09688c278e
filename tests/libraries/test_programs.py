"""Models that libraries train are accelerated within the libraries, without a code change, with equal results."""

import math

import nano_loop
from benchmarks.fresh import fresh
from benchmarks.libraries import PROGRAMS

from .conftest import HERE, are_equal, train


def train_with(name, **options):
    """Return the results of a program in the ambient mode, and the report."""
    nano_loop.install(verbose=False, **options)
    try:
        return *train(name), nano_loop.report()
    finally:
        nano_loop.uninstall()


def models_of(report):
    return {result.detail for result in report.results if (result.name, result.status) == ("model", "applied")}


def test_exact_fit_has_the_bits_of_a_plain_one_and_leaves_nothing(plain):
    name, weights, loss = plain
    exact_weights, exact_loss, report = train_with(name, exact=True)
    assert models_of(report) == {*PROGRAMS[name].models}
    assert exact_loss == loss
    assert are_equal(weights, exact_weights)
    assert are_equal(weights, train(name)[0])


def test_fit_in_auto_ends_with_the_loss_of_a_plain_one_and_optimizers_of_torch_are_fused(plain):
    name, _, loss = plain
    _, auto_loss, report = train_with(name, precision="auto")
    assert math.isclose(auto_loss, loss, rel_tol=0.02)
    assert models_of(report) == {*PROGRAMS[name].models}
    # Optimizers of other libraries step with their own code.
    assert ("fused_optimizer" in report.applied) == (name != "keras")
    assert not any(result.code == "not_set_up" for result in report.results)


def test_benchmark_times_a_program_under_the_command():
    program = ("-m", "nano_loop", "run", "-m", "benchmarks.libraries.case")
    result = fresh({"program": HERE[-1], "small": True}, limit=100, program=program)
    assert result["fit"] > 0
    assert math.isfinite(result["loss"])
