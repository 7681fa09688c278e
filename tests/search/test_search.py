"""A search leaves the user's objects as they are, shows what fails, and keeps what it has found."""

import time

import pytest
import torch
from torch import nn

import nano_loop
from nano_loop import NanoConfigError, NanoError, accelerated
from nano_loop.config.options import Options
from nano_loop.search import search
from nano_loop.search.result import Row, differing
from nano_loop.search.search import Measured
from search.small import FIXED, STEPS, loss_of, made, state_of


def test_search_leaves_everything_as_it_was_and_keeps_what_it_has_found(cache, capfd):
    model, optimizer, batch = made()
    before = state_of(model, optimizer)
    found = nano_loop.tune(model, optimizer, batch, loss_of, seconds=15, **FIXED, **STEPS, precision=32)
    assert state_of(model, optimizer) == before
    assert [row.name for row in found.rows] == ["as it is", "plain PyTorch"]
    assert all(row.milliseconds > 0 and row.memory > 1 << 20 for row in found.rows)
    assert found.options["num_threads"] == 1
    assert found.line == f"@nano({', '.join(f'{name}={value}' for name, value in found.options.items())})"
    again = nano_loop.tune(*made(), loss_of, seconds=15, **FIXED, **STEPS, precision=32)
    assert again.cached
    assert not found.cached
    assert (again.rows, again.line) == (found.rows, found.line)
    assert "kept from an earlier search" in str(again)
    assert capfd.readouterr() == ("", "")
    assert len([*(cache / "nano_loop").glob("options-*.json")]) == 1


BF16 = {"precision": "bf16-mixed"}


class WrongInBf16(nn.Linear):
    """Is fast and wrong in bf16."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            return super().forward(x) * 1.5
        time.sleep(0.1)
        return super().forward(x)


@pytest.mark.slow
def test_fastest_candidate_is_not_chosen_if_its_numbers_are_wrong(only):
    only(BF16)
    found = nano_loop.tune(*made(WrongInBf16), loss_of, seconds=40, **FIXED)
    (row,) = [row for row in found.rows if row.options]
    assert row.speed_up > 1.02, found
    assert "not exact" in row.note
    assert row.gradients is not None
    assert "precision" not in found.options


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": 3}, "tune of a int"),
        ({"loss_fn": None}, "loss_fn is a NoneType"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"precison": 32}, "precison=32"),
    ],
)
def test_bad_input_is_named(change, words):
    model, optimizer, batch = made()
    given = {"model": model, "optimizer": optimizer, "batch": batch, "loss_fn": loss_of} | change
    with pytest.raises(NanoConfigError, match=words):
        nano_loop.tune(**given)


def test_model_that_cannot_be_copied_is_named():
    model, optimizer, batch = made()
    model.lines = (each for each in "ab")
    with pytest.raises(NanoError, match=r"argument `model`.*cannot be pickled"):
        nano_loop.tune(model, optimizer, batch, loss_of)


@pytest.mark.slow
def test_loop_that_fails_says_how():
    model, optimizer, _ = made()
    with pytest.raises(NanoError, match=r"the loop fails in a trial: it raised RuntimeError: mat1"):
        nano_loop.tune(model, optimizer, torch.rand(4, 5), loss_of)


def test_run_without_a_function_refuses_to_search():
    with pytest.raises(NanoConfigError, match="tune=True: a search repeats a function"), accelerated(tune=True):
        pass


@pytest.mark.parametrize(("speed", "said"), [(0.5, True), (1.0, False), (1.3, False), (None, False)])
def test_loop_that_is_faster_without_nano_loop_is_told(speed, said):
    remarks = search._remarks(Options(), speed, "")
    assert ["The loop without nano_loop is 2.00 times as fast" in each for each in remarks] == [True] * said


@pytest.mark.parametrize(
    ("seconds", "pays"),
    [
        ([0.1] * 8, True),
        ([0.1, 0.1, 0.1, 9.0, 0.1, 0.1, 0.1, 0.1], True),  # one slow turn decides nothing
        ([0.1, 0.21] * 4, False),
        ([0.199] * 8, False),
        ([0.1] * 2, False),  # too few to tell
        ([], False),
    ],
    ids=str,
)
def test_candidate_pays_that_is_faster_in_nearly_all_turns(seconds, pays):
    assert Measured(Row({}), seconds=seconds, reference=[0.2] * len(seconds)).pays == pays


class Trial:
    """A trial that takes a time a step."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.turns = 0

    def take(self, count, timeout):
        self.turns += 1
        return self.seconds, 1 << 20


@pytest.mark.parametrize(("seconds", "turns"), [(1.0, 1 + 3), (0.19, 1 + search.TURNS), (0.1, 1 + search.TURNS)])
def test_candidate_that_cannot_win_stops_early(seconds, turns):
    it = search.Search(None, None, (), 1e9)
    it._reference, trial, candidate = Trial(0.2), Trial(seconds), Measured(Row({}))
    it._take_turns(candidate, trial, float("inf"))
    assert trial.turns == it._reference.turns == turns
    assert candidate.row.note == ("slower" if seconds == 1.0 else "")
    assert it._own.seconds == [0.2] * (turns - 1)


def test_line_to_paste_leaves_out_what_follows_from_exact():
    assert differing(Options(exact=True, num_threads=1)) == {"exact": True, "num_threads": 1}
    assert differing(Options(fused_optimizer=False)) == {"fused_optimizer": False}
