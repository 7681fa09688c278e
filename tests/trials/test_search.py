"""A search leaves the user's objects as they are, shows what fails, and keeps what it has found."""

import os

import pytest
import torch
from torch import nn

import nano_loop
from nano_loop import NanoConfigError, NanoError, accelerated
from nano_loop.options import Options
from nano_loop.trials import search
from nano_loop.trials.candidates import effective
from nano_loop.trials.live import Measured
from trials.small import FIXED, STEPS, loss_of, made, state_of


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


class FailsInBf16(nn.Linear):
    """Ends its process in bf16, as where memory has run out."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            os.kill(os.getpid(), 9)
        return super().forward(x)


@pytest.mark.slow
def test_candidate_that_is_killed_is_shown_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(search, "alternatives", _only_bf16)
    found = nano_loop.tune(*made(FailsInBf16), loss_of, seconds=15)
    (row,) = [row for row in found.rows if row.options]
    assert "SIGKILL" in row.note
    assert row.milliseconds is None
    assert "precision" not in found.options


class WrongInBf16(nn.Linear):
    """Is fast and wrong in bf16."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            return super().forward(x) * 1.5
        return super().forward(torch.linalg.matrix_exp(torch.rand(200, 200) / 1000)[:1, :1] * 0 + x)


@pytest.mark.slow
def test_fastest_candidate_is_not_chosen_if_its_numbers_are_wrong(monkeypatch):
    monkeypatch.setattr(search, "alternatives", _only_bf16)
    found = nano_loop.tune(*made(WrongInBf16), loss_of, seconds=20)
    (row,) = [row for row in found.rows if row.options]
    assert row.speed_up > 1.02
    assert "not exact" in row.note
    assert row.gradients is not None
    assert "precision" not in found.options


def _only_bf16(stage, *_):
    return [{"precision": "bf16-mixed"}] if stage == "precision and layout" else []


def test_loop_is_repeated_on_copies_and_then_trained_with_the_choice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "alternatives", lambda *_: [])
    calls = []

    @nano_loop.nano(tune=True, verbose=False)
    def train(model, optimizer, batches):
        calls.append(len(batches))
        (tmp_path / "written").touch()
        for x in batches:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        return len(calls)

    model, optimizer, batch = made()
    plain, plains_optimizer, _ = made()
    torch.manual_seed(1)
    assert train(model, optimizer, [batch] * 3) == 1
    assert train.report.options["tune"] is False
    torch.manual_seed(1)
    for _ in range(3):
        plains_optimizer.zero_grad()
        loss_of(plain, batch).backward()
        plains_optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


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
    remarks = search._remarks(Options(), Measured({}, speed=speed))
    assert ["The loop without nano_loop is 2.00 times as fast" in each for each in remarks] == [True] * said


def test_one_process_is_the_same_as_none():
    assert effective({"num_processes": 1, "precision": "32-true"}, Options()) is None
    assert effective({"num_processes": 2}, Options()) == {"num_processes": 2}
    assert effective({"num_processes": 2}, Options(), ["num_processes"]) is None
