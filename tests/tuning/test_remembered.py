"""Ways of gradients are decided once, and guessed for one turn of the tuner until then."""

from nano_loop.autotune import remembered as module
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.remembered import Remembered
from nano_loop.autotune.tuner import Tuner
from tuning.time_for import TimeFor


def test_a_guess_is_taken_for_one_turn_and_a_decision_for_ever():
    budget = TimeFor(0.0)
    found, asked, answers = Remembered(Tuner(Choices(None), budget)), [], {"a": None}

    def way():
        return found.way("a", "guess", lambda: asked.append(1) or answers["a"])

    assert [way(), way()] == ["guess", "guess"]
    assert len(asked) == 1
    budget.turn, answers["a"] = 1, "decided"
    assert [way(), way()] == ["decided", "decided"]
    budget.turn = 2
    assert way() == "decided"
    assert len(asked) == 2


def test_many_shapes_are_forgotten_together(monkeypatch):
    monkeypatch.setattr(module, "_MOST_SHAPES", 3)
    found, asked = Remembered(Tuner(Choices(None), TimeFor(0.0))), []
    for shape in (1, 2, 3, 1, 4, 1):
        found.way(shape, "guess", lambda shape=shape: asked.append(shape) or "decided")
    assert asked == [1, 2, 3, 4, 1]
