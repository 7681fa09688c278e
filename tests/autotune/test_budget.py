"""Measurements begin in the third step, and never take more than two percent of the training so far."""

from threading import Thread

import pytest
import torch

from autotune.time_for import Clock
from nano_loop.autotune import budget as module
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import Race, Tuner

SHARE = module.SHARE


@pytest.fixture
def clock(monkeypatch):
    """The clock of budgets, which a test sets."""
    clock = Clock()
    monkeypatch.setattr(module, "SHARE", SHARE)
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


@pytest.fixture
def budget(clock):
    """A budget, and an optimizer that takes a step of so many seconds."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    opened = module.Budget(measures=True)

    def step(seconds):
        clock.now += seconds
        optimizer.step()

    yield opened, step
    opened.close()


def test_measuring_begins_in_the_third_step_and_two_budgets_share_the_time(budget, clock):
    opened, step = budget
    half = module.Budget(measures=True, part=0.5)
    for _ in range(2):
        assert opened.left(0.0) == 0
        step(1.0)
    assert opened.left(0.0) == pytest.approx(0.018)
    assert opened.left(0.1) < 0
    for _ in range(300):
        step(1.0)
    assert opened.left(5.0) == pytest.approx(0.018 * 301 - 5.0)
    assert half.left(1.0) == pytest.approx(0.009 * 301 - 1.0)
    half.close()


@pytest.mark.parametrize("seconds", [0.0013, 0.013, 0.13])
@pytest.mark.parametrize("preparing", [0.0, 0.004])
def test_short_fit_loses_two_percent_and_what_one_algorithm_takes_before_it_is_seen(budget, clock, seconds, preparing):
    """A fit of 100 steps beside a neighbour, by which operators take a tenth of a step, and later 3 times as long."""
    opened, step = budget
    tuner = Tuner(Choices(None), opened, clock)
    asked_at = {}

    def race(operator):
        clock.now += preparing  # as the copies that algorithms compute on

        def computes():
            clock.now += operator
            return [torch.ones(1)]

        return Race({"torch": computes, "c": computes, "other": computes}, "torch", None)

    begun = clock.now
    for number in range(100):
        operator = seconds * (0.1 if number < 50 else 0.3)
        for key in range(6):
            if asked_at.get(key) != opened.turn:
                asked_at[key] = opened.turn
                tuner.choose(str(key), "torch", lambda operator=operator: race(operator))
        step(seconds)
        lost = clock.now - begun - (number + 1) * seconds
        assert lost <= 0.02 * (clock.now - begun) + operator + preparing
    assert tuner.spent > 0


def test_steps_of_other_threads_do_not_count(budget):
    opened, step = budget
    for _ in range(3):
        thread = Thread(target=step, args=(1.0,))
        thread.start()
        thread.join()
    assert opened.left(0.0) == 0


def test_others_measure_nothing(budget):
    other = module.Budget(measures=False)
    _, step = budget
    for _ in range(5):
        step(1.0)
    other.close()
    assert other.turn == 3
    assert other.left(0.0) == 0


def test_turns_become_longer(budget):
    opened, step = budget
    turns, called = [], []
    opened._at_turn = lambda: called.append(opened.turn)
    for _ in range(16):
        step(1.0)
        turns.append(opened.turn)
    assert turns == [1, 2, 2, *[3] * 4, *[4] * 8, 5]
    assert called == [1, 2, 3, 4, 5]
