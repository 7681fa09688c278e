"""A search leaves the user's objects as they are, shows what fails, and keeps what it has found."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nano_loop
from nano_loop import NanoConfigError, NanoError, accelerated
from nano_loop.config.options import Options
from nano_loop.runtime.settings import Settings
from nano_loop.search import search
from nano_loop.search.measured import Measured
from nano_loop.search.result import Row, differing
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
    assert f"kept from {found.date}; --again" in str(again)
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


def measured(changes, *ratios, own=0.2):
    """Return a candidate that was so many times as fast as the options as they are, turn by turn."""
    return Measured(Row(changes), seconds=[own / ratio for ratio in ratios], reference=[own] * len(ratios))


def test_row_with_a_shorter_time_has_a_higher_speed_also_where_the_machine_has_changed():
    # The machine was twice as slow in the turns of the first.
    faster, slower = measured({"a": 1}, *[1.5] * 4, own=0.4), measured({"a": 2}, *[0.5] * 4, own=0.2)
    rows = [candidate.finish(0.2, 1.0) for candidate in (faster, slower)]
    assert rows[0].milliseconds == pytest.approx(200 / 1.5)
    assert rows[1].milliseconds == pytest.approx(400)
    assert rows[0].speed_up > 1 > rows[1].speed_up


@pytest.fixture
def unsearched(monkeypatch):
    """Give a search whose processes are not started: a function says what it has measured, and what raises."""

    def unsearched(*candidates, raises=None, load=0.0):
        it = search.Search(SimpleNamespace(written=("@nano(", ")")), Settings.read({}), (), 1e9)

        def measure(stack):
            it._loads = [load]
            it._own.seconds = [0.2] * 6
            it._measured += [Measured(Row({}, plain=True), seconds=[0.3] * 6, reference=[0.2] * 6), *candidates]
            if raises is not None:
                raise raises
            return it._chosen(candidates)

        monkeypatch.setattr(it, "_measure", measure)
        return it

    return unsearched


def test_number_of_processes_is_not_chosen_for_its_speed(unsearched):
    faster = measured({"num_processes": 2}, *[1.6] * 6)
    tuning = unsearched(faster).run()
    assert (tuning.changes, tuning.rows[2].note) == ({}, "other batches")
    (remark,) = tuning.remarks
    assert remark.startswith("num_processes=2 is 1.60 times as fast as the choice")


def test_ctrl_c_shows_what_was_measured_so_far(unsearched):
    half, none = measured({"num_threads": 1}, *[1.2] * 3), measured({"precision": "bf16-mixed"})
    half.seconds.append(0.1)  # of a turn that was interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        unsearched(half, none, raises=KeyboardInterrupt()).run()
    tuning = caught.value.tuning
    assert [row.note for row in tuning.rows] == ["", "", "", "not measured: interrupted"]
    assert tuning.rows[2].speed_up == pytest.approx(1.2 * 1.5)
    assert str(tuning) in str(caught.value)


@pytest.mark.parametrize("load", [0.0, 0.5])
def test_times_of_a_busy_machine_are_marked_and_not_kept(unsearched, cache, monkeypatch, load):
    it = unsearched(load=load)
    monkeypatch.setattr(search, "Search", lambda *_: it)
    monkeypatch.setattr(search, "key_of", lambda *_: "key")
    tuning = search.search(None, None, ())
    assert [remark.startswith("Other programs kept 50%") for remark in tuning.remarks] == [True] * bool(load)
    assert search.search(None, None, ()).cached != bool(load)


def test_text_is_at_most_100_columns_wide(unsearched):
    candidates = [measured({"precision": "bf16-products", "num_threads": 1, "compile": True}, *[0.6] * 6)]
    candidates[0].row.note = "raised RuntimeError: " + "a long reason that goes on and on " * 5
    lines = str(unsearched(*candidates).run()).splitlines()
    assert max(map(len, lines)) <= 100
    assert "goes on and on" in " ".join(lines)
