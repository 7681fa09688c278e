"""Measurements start in the third step, and take a few percent of the loop's time."""

import time
from threading import Thread

import pytest
import torch

from nano_loop.autotune import tuner as module
from nano_loop.runtime.clock import StepClock

STEPS = module.STEPS


@pytest.fixture
def clocked(monkeypatch, measuring):
    """Return a budget with a clock that a test sets, and a function that takes a step of the given seconds."""
    now = [100.0]
    monkeypatch.setattr(module, "STEPS", STEPS)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    clock = StepClock()
    clock.add([optimizer])

    def step(seconds):
        now[0] += seconds
        optimizer.step()

    return clock, step


def test_measuring_begins_in_the_third_step_and_takes_less_than_three_percent_of_a_hundred(clocked):
    clock, step = clocked
    budget = module.Budget(clock)
    for _ in range(2):
        assert budget.left() == budget.left(in_advance=False) == 0
        step(1.0)
    assert (budget.left(), budget.left(in_advance=False)) == pytest.approx((1.8, 0.018))
    budget.spend(1.9)
    assert budget.left() < 0
    step(9.0)  # with measurements, so not counted as a step's time
    assert budget.left() < 0
    for _ in range(300):
        step(1.0)
    budget.spend(3.1)
    assert budget.left() == budget.left(in_advance=False) == pytest.approx(0.018 * 310 - 5.0)


def test_other_threads_and_other_ranks_measure_nothing(clocked):
    clock, step = clocked
    budget, of_rank_1, found = module.Budget(clock), module.Budget(clock, measures=False), []
    for _ in range(5):
        step(1.0)
    thread = Thread(target=lambda: found.append(budget.left()))
    thread.start()
    thread.join()
    assert found == [0]
    assert of_rank_1.left() == 0
