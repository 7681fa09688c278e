"""Calls of a generation use the same algorithm, and a call repeated by an activation checkpoint uses its forward's."""

import pytest
import torch

from autotune.time_for import ALWAYS, TimeFor
from nano_loop.autotune import race as module
from nano_loop.autotune.choices import Choice, Choices
from nano_loop.autotune.race import Generation, key_of
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels.override import TORCH, Call

OTHER = "other"


class Answering(Tuner):
    """Returns a fixed answer instead of measuring."""

    answer = OTHER

    def __init__(self, budget=ALWAYS):
        super().__init__(Choices(None), budget)
        self.asked = []

    def choose(self, key, guess, race):
        self.asked.append(key)
        return self.answer


@pytest.fixture
def tuner():
    return Answering()


def call(rows=4, leaves=0):
    return Call("product", (torch.ones(rows, 3), torch.ones(3, 2)), leaves=leaves)


def ask(generation, *args, names=(TORCH, OTHER), **kwargs):
    return generation.algorithm(call(*args, **kwargs), lambda: dict.fromkeys(names), TORCH)


def test_what_is_settled_is_not_asked_again_in_later_generations_either(tuner):
    generation = Generation(tuner)
    assert [ask(generation), ask(generation), ask(generation.next())] == [OTHER] * 3
    assert len(tuner.asked) == 1


def test_guess_holds_for_a_generation(tuner):
    tuner.answer = None
    generation = Generation(tuner)
    assert [ask(generation), ask(generation)] == [TORCH] * 2
    tuner.answer = OTHER
    following = generation.next()
    assert ask(following) == OTHER
    assert ask(generation) == TORCH  # as in the forward, for a backward that runs later
    assert len(tuner.asked) == 2


def test_stored_choice_is_taken_at_once_and_one_of_another_version_is_not(tuner):
    tuner.choices.put(key_of(call()), Choice(OTHER, TORCH, {}))
    assert ask(Generation(tuner)) == OTHER
    assert ask(Generation(tuner), names=(TORCH, "third")) == TORCH
    assert tuner.asked == []


def test_recomputation_with_gradients_is_not_measured_and_a_gradient_is(tuner, monkeypatch):
    monkeypatch.setattr(module, "in_backward", lambda: True)
    generation = Generation(tuner)
    assert ask(generation, leaves=1) == TORCH
    assert ask(generation) == OTHER
    assert len(tuner.asked) == 1


def test_nothing_is_measured_in_inference_mode(tuner):
    with torch.inference_mode():
        assert ask(Generation(tuner)) == TORCH
    assert tuner.asked == []


def test_many_kinds_are_forgotten_together(tuner, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KINDS", 3)
    generation = Generation(tuner)
    for rows in (1, 2, 3, 1, 4, 1):
        ask(generation, rows)
    assert len(tuner.asked) == 5


def test_one_algorithm_is_taken_without_a_question():
    budget = TimeFor(float("inf"))
    assert ask(Generation(Tuner(Choices(None), budget)), names=(TORCH,)) == TORCH
    assert not budget.asked
