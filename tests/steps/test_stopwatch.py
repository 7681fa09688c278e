"""A loop's steps are timed from the end of one to the end of the next, and nothing is left on the optimizer."""

import pytest
import torch

from nano_loop.steps import stopwatch
from nano_loop.steps.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """Let time stand still, but for what a test adds to it."""
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def optimizer():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


def take(optimizer, clock, *seconds):
    for each in seconds:
        clock[0] += each
        optimizer.step()


def test_median_leaves_the_first_steps_out(optimizer, clock):
    watch = Stopwatch(optimizer)
    take(optimizer, clock, 50, 50, 50, 50, 0.003, 0.002, 0.004, 0.003, 9)
    assert watch.median_ms() == pytest.approx(3)


def test_few_steps_are_no_measurement(optimizer, clock):
    watch = Stopwatch(optimizer)
    take(optimizer, clock, *[1] * 8)
    assert watch.median_ms() is None
    take(optimizer, clock, 1)
    assert watch.median_ms() == pytest.approx(1000)


def test_of_a_long_run_the_last_steps_count(optimizer, clock):
    watch = Stopwatch(optimizer)
    take(optimizer, clock, *[1] * 1500, *[2] * 900)
    assert watch.median_ms() == pytest.approx(2000)
    assert len(watch._ends) == 1001
