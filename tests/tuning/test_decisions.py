"""A call is computed as it was decided, and one that an activation checkpoint repeats as in its forward."""

import threading

import pytest

from nano_loop.autotune import decisions
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.decisions import Decision, Decisions
from nano_loop.autotune.tuner import Tuner
from tuning.time_for import ALWAYS

GUESS, STORED = "guess", "stored"


class Turning(Tuner):
    turn = 0


@pytest.fixture
def tuner():
    return Turning(Choices(None), ALWAYS)


@pytest.fixture
def way(tuner):
    """Ask for a call's way, where `decision` is what would be decided; without one, nothing may be."""
    made = Decisions(tuner)

    def ask(key=0, decision=None, stored=lambda: STORED):
        decide = (lambda: decision) if decision else lambda: pytest.fail("decided again")
        return made.way(key, lambda: GUESS, decide, stored)

    return ask


@pytest.fixture
def backward_of(monkeypatch):
    """Let calls be those of a backward, at the autograd node of a number."""

    def enter(node):
        monkeypatch.setattr(decisions, "in_backward", lambda: True)
        monkeypatch.setattr(decisions, "current_node_number", lambda: node)

    return enter


def test_what_is_settled_is_not_asked_again(way):
    assert way(decision=Decision("one")) == "one"
    assert way() == "one"


def test_a_guess_holds_for_a_turn(way, tuner):
    assert way(decision=Decision(GUESS, is_settled=False)) == GUESS
    assert way() == GUESS
    tuner.turn += 1
    assert way(decision=Decision("one")) == "one"


def test_calls_before_and_after_the_decision_are_repeated_as_they_were(way, tuner, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "next_node_number", lambda: 10)
    way(decision=Decision(GUESS, is_settled=False))
    tuner.turn += 1
    way(decision=Decision("one"))
    backward_of(9)
    assert way() == GUESS
    in_another_thread = []
    thread = threading.Thread(target=lambda: in_another_thread.append(way()))
    thread.start()
    thread.join()
    assert in_another_thread == ["one"]  # whose nodes have other numbers
    backward_of(10)
    assert way() == "one"


def test_first_call_that_is_decided_has_no_calls_before(way, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "next_node_number", lambda: 10)
    way(decision=Decision("one"))
    backward_of(9)
    assert way() == "one"


def test_what_was_forgotten_is_repeated_as_it_was_measured(way, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    way(0, Decision("one"))
    way(1, Decision("two"))
    backward_of(9)
    assert way(0) == STORED
    assert way(0, stored=lambda: None) == GUESS
    assert way(1) == "two"


def test_what_was_forgotten_is_not_taken_for_new(way, tuner, backward_of, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    monkeypatch.setattr(decisions, "next_node_number", lambda: 10)
    way(0, Decision(GUESS, is_settled=False))
    way(1, Decision("two"))
    way(0, Decision("one"))
    backward_of(9)
    assert way(0) == GUESS
