"""A run is entered once, undoes its steps in reverse, and leaves nothing behind if entering or leaving fails."""

import contextlib

import pytest
import torch
from torch import nn

from nano_loop import NanoError
from nano_loop.runtime import run as module
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.run import Run
from nano_loop.runtime.settings import Settings
from nano_loop.steps.step import Step


def settings(**options):
    return Settings.read({"verbose": False, **options})


class Noting(Step):
    """Records its method calls; a subclass may fail in one of them."""

    notes: list
    fails_at = None
    enabled, required = True, False

    def skip_reason(self, parts):
        return None

    def apply(self, parts):
        self.note("apply")
        return "done"

    def undo(self):
        super().undo()
        self.note("undo")

    def note(self, what):
        self.notes.append((self.name, what))
        if self.fails_at == what:
            raise ZeroDivisionError(f"{self.name} {what}")


@pytest.fixture
def steps(monkeypatch):
    """Make runs use two recording steps; return the records and the classes."""
    notes = []
    kinds = [type(name, (Noting,), {"name": name, "notes": notes}) for name in ("first", "second")]
    monkeypatch.setattr(module, "STEPS", tuple(kinds))
    return notes, kinds


@pytest.mark.parametrize("where", [None, "body", "apply", "undo"])
def test_steps_are_applied_in_order_and_undone_in_reverse_whatever_raises(steps, where):
    notes, (_, second) = steps
    second.fails_at = where

    def run_it():
        with Run(settings()) as run:
            run.apply(TrainingObjects([nn.Linear(1, 1)]))
            if where == "body":
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if where else contextlib.nullcontext():
        run_it()
    assert notes == [("first", "apply"), ("second", "apply"), ("second", "undo"), ("first", "undo")]


def test_run_that_cannot_begin_undoes_what_it_has_begun(steps, monkeypatch):
    notes, (_, second) = steps
    monkeypatch.setattr(second, "__init__", lambda self, *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), Run(settings()):
        pass
    assert notes == []


def test_report_stays_and_setup_is_refused_after_the_end():
    run = Run(settings())
    with pytest.raises(NanoError, match="outside a run"):
        run.apply(TrainingObjects([nn.Linear(1, 1)]))
    with run:
        run.setup(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    assert "fused_optimizer" in run.report.applied
    with pytest.raises(NanoError, match="outside a run"):
        run.apply(TrainingObjects([nn.Linear(1, 1)]))


def test_closing_words_of_steps_are_for_runs_that_end_well(steps, monkeypatch):
    _, (first, _) = steps
    monkeypatch.setattr(first, "final_result", lambda self: module.StepResult("first", "measured", "all"))
    with Run(settings()) as good:
        good.apply(TrainingObjects([nn.Linear(1, 1)]))
    bad = Run(settings())

    def raising():
        with bad:
            bad.apply(TrainingObjects([nn.Linear(1, 1)]))
            raise KeyError

    with pytest.raises(KeyError):
        raising()
    assert [result.status for result in good.report.results] == ["applied", "applied", "measured"]
    assert [result.status for result in bad.report.results] == ["applied", "applied"]
