"""A call is computed as it was decided, and one that an activation checkpoint repeats as in its forward."""

import threading

import pytest

from autotune.time_for import ALWAYS
from nano_loop.autotune import decisions
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.decisions import Decision, Decisions
from nano_loop.autotune.tuner import Tuner

GUESS, STORED = "guess", "stored"


class Turning(Tuner):
    turn = 0


@pytest.fixture
def tuner():
    return Turning(Choices(None), ALWAYS)


@pytest.fixture
def algorithm(tuner, request):
    """Ask for a call's algorithm, where `decision` is what would be decided; without one, nothing may be."""
    made = Decisions(tuner, getattr(request, "param", False))

    def ask(key=0, decision=None, stored=lambda: STORED):
        decide = (lambda: decision) if decision else lambda: pytest.fail("decided again")
        return made.algorithm(key, lambda: GUESS, decide, stored)

    return ask


@pytest.fixture
def backward_of(monkeypatch):
    """Let calls be those of a backward, at the autograd node of a number."""

    def enter(node):
        monkeypatch.setattr(decisions, "in_backward", lambda: True)
        monkeypatch.setattr(decisions, "current_node_number", lambda: node)

    return enter


def test_what_is_settled_is_not_asked_again(algorithm):
    assert algorithm(decision=Decision("one")) == "one"
    assert algorithm() == "one"


def test_a_guess_holds_for_a_turn(algorithm, tuner):
    assert algorithm(decision=Decision(GUESS, is_settled=False)) == GUESS
    assert algorithm() == GUESS
    tuner.turn += 1
    assert algorithm(decision=Decision("one")) == "one"


def test_calls_before_and_after_the_decision_are_repeated_as_they_were(algorithm, tuner, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "next_node_number", lambda: 10)
    algorithm(decision=Decision(GUESS, is_settled=False))
    tuner.turn += 1
    algorithm(decision=Decision("one"))
    backward_of(9)
    assert algorithm() == GUESS
    in_another_thread = []
    thread = threading.Thread(target=lambda: in_another_thread.append(algorithm()))
    thread.start()
    thread.join()
    assert in_another_thread == ["one"]  # whose nodes have other numbers
    backward_of(10)
    assert algorithm() == "one"


def test_first_call_that_is_decided_has_no_calls_before(algorithm, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "next_node_number", lambda: 10)
    algorithm(decision=Decision("one"))
    backward_of(9)
    assert algorithm() == "one"


def test_what_was_forgotten_is_repeated_as_it_was_measured(algorithm, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    algorithm(0, Decision("one"))
    algorithm(1, Decision("two"))
    backward_of(9)
    assert algorithm(0) == STORED
    assert algorithm(0, stored=lambda: None) == GUESS
    assert algorithm(1) == "two"


def test_what_was_forgotten_is_not_taken_for_new(algorithm, tuner, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    monkeypatch.setattr(decisions, "next_node_number", lambda: 10)
    algorithm(0, Decision(GUESS, is_settled=False))
    algorithm(1, Decision("two"))
    algorithm(0, Decision("one"))
    backward_of(9)
    assert algorithm(0) == GUESS


@pytest.mark.parametrize("algorithm", [True], indirect=True, ids=["has_gradients"])
def test_gradient_is_decided_in_a_backward_and_again_by_a_forward_of_its_kind(
    algorithm, tuner, backward_of, monkeypatch
):
    backward_of(9)
    assert algorithm(decision=Decision(GUESS, is_settled=False)) == GUESS
    assert algorithm() == GUESS
    tuner.turn += 1
    assert algorithm(decision=Decision("one")) == "one"
    assert algorithm() == "one"
    monkeypatch.setattr(decisions, "in_backward", lambda: False)
    assert algorithm(decision=Decision(GUESS, is_settled=False)) == GUESS
    backward_of(9)
    tuner.turn += 1
    assert algorithm() == GUESS  # as in the forward that is called again


def test_many_kinds_are_forgotten_together(tuner, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 3)
    made, asked = Decisions(tuner), []
    for kind in (1, 2, 3, 1, 4, 1):
        made.algorithm(kind, lambda: GUESS, lambda kind=kind: asked.append(kind) or Decision("one"), lambda: STORED)
    assert asked == [1, 2, 3, 4, 1]
