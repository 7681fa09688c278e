"""Measurements begin in the third step, and take a few percent of the time of the loop."""

from threading import Thread

import pytest
import torch

from nano_loop.autotune import budget as module

STEPS = module.STEPS


@pytest.fixture
def budget(monkeypatch, measuring):
    """A budget whose clock a test sets, and an optimizer that takes a step of so many seconds."""
    now = [100.0]
    monkeypatch.setattr(module, "STEPS", STEPS)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    opened = module.Budget(measures=True)

    def step(seconds):
        now[0] += seconds
        optimizer.step()

    yield opened, step
    opened.close()


def test_measuring_begins_in_the_third_step_and_takes_less_than_three_percent_of_a_hundred(budget):
    opened, step = budget
    half = module.Budget(measures=True, part=0.5, in_advance=False)
    for _ in range(2):
        assert opened.left(0.0) == half.left(0.0) == 0
        step(1.0)
    assert (opened.left(0.0), half.left(0.0)) == pytest.approx((1.8, 0.009))
    assert opened.left(1.9) < 0
    step(9.0)  # with measurements, so it is no step's time
    assert opened.left(1.9) < 0
    for _ in range(300):
        step(1.0)
    assert opened.left(5.0) == pytest.approx(0.018 * 310 - 5.0)
    assert half.left(1.0) == pytest.approx(0.009 * 310 - 1.0)
    half.close()


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
