"""num_threads="auto" times steps with one and with more threads in turn, and continues with the faster number."""

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from nano_loop.autotune import tuner as budget_module
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import Budget
from nano_loop.runtime import trial as module
from nano_loop.runtime.clock import StepClock
from nano_loop.runtime.trial import PATIENCE, StepTrial

SHARE = budget_module.SHARE
MORE = 4


class Loop:
    """A loop on a fake clock, whose steps take a time per number of threads; it records the numbers."""

    def __init__(self, monkeypatch, choices, longer=MORE - 1):
        self.now, self.numbers = 0.0, []
        monkeypatch.setattr(budget_module, "SHARE", SHARE)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "choices_for", lambda machine: choices)
        self.optimizer, self.other = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1) for _ in range(2))
        self.clock = StepClock()
        self.clock.add([self.optimizer, self.other])
        take, present = torch.set_num_threads, torch.get_num_threads
        self.budget = Budget(self.clock)
        self.trial = StepTrial("x", (MORE, 1), take, self.budget, None, longer=longer, present=present)
        self.clock.after(self.trial.note)

    def steps(self, count, seconds, noise=lambda: 1.0):
        """Take steps that last the given seconds per number of threads."""
        for _ in range(count):
            self.numbers.append(torch.get_num_threads())
            self.now += seconds[self.numbers[-1]] * noise()
            self.optimizer.step()


@pytest.fixture
def made(monkeypatch):
    before, loops = torch.get_num_threads(), []

    def make(choices, **options):
        torch.set_num_threads(MORE)
        loops.append(Loop(monkeypatch, choices, **options))
        return loops[-1]

    yield make
    for loop in loops:
        loop.trial.end()
    torch.set_num_threads(before)


@pytest.fixture
def loop(made):
    return made(Choices(None))


@pytest.mark.parametrize(("one", "number"), [(0.5, 1), (0.89, 1), (0.92, MORE), (1.0, MORE), (1.25, MORE), (4.0, MORE)])
def test_loop_goes_on_with_one_thread_where_that_is_faster_by_ten_percent(loop, one, number):
    loop.steps(1500, {1: one, MORE: 1.0})
    assert loop.trial.measured == 1
    assert loop.numbers[-500:] == [number] * 500
    measured = loop.numbers[loop.numbers.index(1) - 1 :][:6]
    assert measured == [MORE, 1, 1, MORE, MORE, 1] or one > 1  # alternating, and no later than the budget allows
    assert loop.trial.medians == pytest.approx({1: one, MORE: 1.0})


@pytest.mark.parametrize("share", [0.9, 0.1, None])
def test_what_is_found_beside_other_programs_is_marked_and_for_this_run_alone(loop, monkeypatch, share):
    monkeypatch.setattr(module, "Waits", lambda: SimpleNamespace(share=lambda: share))
    loop.steps(1500, {1: 0.5, MORE: 1.0})
    assert loop.trial.setting == 1
    assert bool(loop.trial.unsure) == (share == 0.9)
    assert bool(loop.trial._choices._unsure) == (share == 0.9)


@pytest.mark.parametrize(("one", "number"), [(0.6, 1), (1.0, MORE)])
def test_steps_that_are_disturbed_now_and_then_do_not_decide(loop, one, number):
    draw = random.Random(0)
    loop.steps(2000, {1: one, MORE: 1.0}, lambda: draw.uniform(0.95, 1.05) * (1 if draw.random() < 0.8 else 5))
    assert loop.trial.measured >= 1
    assert loop.trial.setting == number


@pytest.mark.parametrize("one", [1.2, 2.0, float(MORE)])
def test_slower_steps_never_cost_more_than_two_percent_of_the_training_so_far(loop, one):
    for _ in range(3000):
        loop.steps(1, {1: one, MORE: 1.0})
        assert (one - 1) * loop.numbers.count(1) <= 0.02 * loop.now
    assert loop.trial.measured == 1
    assert loop.numbers.count(1) >= 3


@pytest.mark.parametrize(("one", "number", "decided"), [(0.5, 1, True), (1.1, MORE, True), (1.5, MORE, False)])
def test_trial_that_costs_little_does_not_wait_until_other_measurements_are_within_their_budget(
    made, one, number, decided
):
    loop = made(Choices(None), longer=0.1)
    loop.steps(3, {1: one, MORE: 1.0})
    loop.budget.spend(10.0)
    loop.steps(60, {1: one, MORE: 1.0})
    assert bool(loop.trial.measured) == decided
    assert loop.trial.setting == number
    assert (one - 1) * loop.numbers.count(1) <= 1.0  # the usual time of a step


def test_it_is_measured_again_when_steps_take_twice_as_long_and_both_numbers_can_be_taken_again(loop):
    loop.steps(1000, {1: 1.5, MORE: 1.0})
    assert (loop.trial.setting, loop.trial.measured) == (MORE, 1)
    loop.steps(1000, {1: 1.5, MORE: 1.9})
    assert (loop.trial.setting, loop.trial.measured) == (MORE, 1)
    loop.steps(1000, {1: 1.5, MORE: 3.0})  # another process uses one of the cores
    assert (loop.trial.setting, loop.trial.measured) == (1, 2)
    loop.steps(2000, {1: 4.0, MORE: 1.0})  # larger batches, without the other process
    assert (loop.trial.setting, loop.trial.measured) == (MORE, 3)


def test_number_that_the_loop_sets_ends_it(loop):
    loop.steps(500, {1: 0.5, MORE: 1.0})
    torch.set_num_threads(3)
    loop.steps(100, {3: 9.0})
    torch.set_num_threads(loop.trial.setting)
    loop.steps(1000, {1: 9.0, MORE: 1.0})
    assert set(loop.numbers[500:]) == {3, 1}


def test_steps_of_other_threads_do_not_count(loop):
    thread = threading.Thread(target=loop.steps, args=(200, dict.fromkeys(range(64), 1.0)))
    thread.start()
    thread.join()
    assert (loop.trial.measured, torch.get_num_threads()) == (0, MORE)


def test_deterministic_mode_brings_back_the_first_number_and_ends_measurements(loop, deterministic):
    loop.steps(500, {1: 0.5, MORE: 1.0})
    assert torch.get_num_threads() == 1
    deterministic()
    loop.numbers.clear()
    loop.steps(500, {1: 0.5, MORE: 1.0})
    assert set(loop.numbers[1:]) == {MORE}
    torch.use_deterministic_algorithms(False)
    loop.steps(500, {1: 0.5, MORE: 1.0})
    assert torch.get_num_threads() == 1


def test_what_an_earlier_run_has_found_holds_at_once_until_steps_take_longer(made):
    choices = Choices(None)
    first = made(choices)
    first.steps(1500, {1: 0.5, MORE: 1.0})
    assert first.trial.measured == 1
    again = made(choices)
    again.steps(20, {1: 0.5, MORE: 1.0})
    assert again.numbers == [MORE] * 10 + [1] * 10
    assert (again.trial.measured, again.trial.medians) == (0, pytest.approx({1: 0.5, MORE: 1.0}))
    again.steps(2000, {1: 1.3, MORE: 1.0})  # the saved result is used once
    assert (again.trial.setting, again.trial.measured) == (MORE, 1)
    larger = made(choices)  # larger batches
    larger.steps(20, {1: 50.0, MORE: 100.0})
    assert set(larger.numbers) == {MORE}


def test_run_starts_with_what_all_earlier_ones_have_found_where_that_cannot_cost_much(made):
    choices = Choices(None)
    made(choices, longer=1.0).steps(1500, {1: 0.5, MORE: 1.0})
    again = made(choices, longer=1.0)
    again.steps(30, {1: 0.5, MORE: 1.0})
    assert again.numbers == [MORE] + [1] * 29
    assert (again.trial.setting, again.trial.measured) == (1, 0)
    assert again.trial.medians == pytest.approx({1: 0.5, MORE: 1.0})
    larger = made(choices, longer=1.0)  # larger batches
    larger.steps(1500, {1: 100.0, MORE: 50.0})
    assert larger.numbers[:20] == [MORE] + [1] * 3 + [MORE] * 16
    assert (larger.trial.setting, larger.trial.measured) == (MORE, 1)
    different = made(choices, longer=1.0)  # which of the two results applies is known by the time of the first steps
    different.steps(20, {1: 0.5, MORE: 1.0})
    assert different.numbers == [MORE] * 10 + [1] * 10


def test_nothing_is_measured_before_the_run_allows_it(made):
    choices = Choices(None)
    loop = made(choices)
    loop.trial.may_measure = False
    loop.steps(1500, {1: 0.5, MORE: 1.0})
    assert set(loop.numbers) == {MORE}
    loop.trial.may_measure = True
    loop.steps(1500, {1: 0.5, MORE: 1.0})
    assert loop.trial.setting == 1


def test_one_setting_is_tried_at_a_time_and_given_up_when_its_optimizer_steps_no_more(loop):
    """This happens if a program continues with another model."""
    taken, clock = [], StepClock()
    second = StepTrial("x", ("a", "b"), taken.append, Budget(clock), None)
    clock.add([loop.other])
    clock.after(second.note)
    for _ in range(500):
        loop.steps(1, {1: 0.5, MORE: 1.0})
        if loop.trial.is_under_way:
            break
    for _ in range(PATIENCE):
        loop.now += 1.0
        loop.other.step()
    assert loop.trial.is_under_way
    assert not taken
    loop.now += 1.0
    loop.other.step()
    assert not loop.trial.is_under_way
    assert torch.get_num_threads() == MORE
    for _ in range(100):
        loop.now += 1.0
        loop.other.step()
    assert second.measured == 1
    assert {*taken} == {"a", "b"}
    assert loop.trial.measured == 1  # measured by the optimizer that still steps
    assert torch.get_num_threads() == MORE
    second.end()
