"""Runs in bf16 time the algorithms in their first steps, within a budget, and later runs start tuned."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.autotune import choices, tuner
from nano_loop.autotune.choices import Choice, Choices
from nano_loop.distributed.comm.ranks import RunContext
from nano_loop.kernels import override
from nano_loop.kernels.norm import norms
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import Rules
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import tune_operators as module
from nano_loop.steps.tune_operators import TuneOperators

OPTIONS = {"precision": "bf16", "verbose": False, "channels_last": True}
IN_FP32 = Choice("torch/fp32", "torch", {"torch": 2.0, "torch/fp32": 1.0})
measured = pytest.mark.skipif(not gives_kernels(), reason="torch does not say which kernel an operator has")


def parts(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Tanh())
    return model, torch.optim.SGD(model.parameters(), 0.01), torch.randn(4, 2, 8, 6, 6)


def fit(model, optimizer, batches, epochs=3):
    for _ in range(epochs):
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def stored(folder):
    (path,) = folder.glob("operators-*.json")
    return json.loads(path.read_text())["choices"]


@measured
def test_report_says_what_was_measured_and_a_later_run_starts_with_it(measuring, monkeypatch):
    train = nano(**OPTIONS)(fit)
    train(*parts())
    assert "measurements from the third step on" in str(train.report)
    assert " timed in " in train.report["tune_operators"].detail
    assert {key.split()[1] for key in stored(measuring)} == {"gradients"}
    monkeypatch.setattr(choices, "_opened", {})  # as in a new process
    monkeypatch.setattr(tuner, "fastest", lambda *_: pytest.fail("it was measured before"))
    train(*parts())
    assert train.report["tune_operators"].detail == "measurements from the third step on"


@measured
@pytest.mark.parametrize(("share", "is_kept"), [(0.5, False), (0.1, True), (None, True)])
def test_choices_of_a_busy_moment_are_measured_again_by_the_next_run(measuring, monkeypatch, share, is_kept):
    monkeypatch.setattr(module, "Waits", lambda: SimpleNamespace(share=lambda: share))
    train = nano(**OPTIONS)(fit)
    for is_first in (True, False):
        train(*parts())
        assert (" timed in " in train.report["tune_operators"].detail) == (is_first or not is_kept)
    assert any(measuring.glob("operators-*.json")) == is_kept


@measured
@pytest.mark.parametrize("guess", [override.TORCH, override.COMPILED])
def test_run_in_fp32_measures_functions_in_c_and_leaves_statistics_alone(measuring, monkeypatch, guess):
    monkeypatch.setattr(norms, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(override, "_default_in_fp32", lambda: guess)

    def state(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Tanh(), nn.Flatten(2), nn.LayerNorm(64))
        train = nano(verbose=False, **options)(fit)
        train(model, torch.optim.SGD(model.parameters(), 0.01), torch.randn(4, 2, 8, 10, 10))
        return [*model.state_dict().values()], train.report

    found, report = state()
    assert "tune_operators" in report.applied
    words = {key.split()[1] for key in stored(measuring)}
    assert words == {"batch_norm", "batch_norm_backward", "layer_norm"}
    expected, report = state(exact=True)
    assert "tune_operators" not in str(report)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"precision": 64}, "not_bf16"),
        ({"precision": 32}, "too_small"),
        ({"compile": True}, "compiled"),
        ({"log_casts": True}, "log_casts"),
        ({"precision": "bf16"}, "deterministic"),
        ({"precision": "bf16-products"}, "too_small"),
    ],
)
def test_where_nothing_can_be_measured_the_reason_is_said(step, deterministic, options, code):
    if code == "deterministic":
        deterministic()
    made = step(TuneOperators, **{"precision": "bf16"} | options)
    assert made.skip_reason(TrainingObjects([nn.Linear(2, 2)])).code == code


@measured
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "auto", 32])
def test_mode_that_the_loop_switches_on_keeps_to_the_first_guesses(
    measuring, monkeypatch, deterministic, precision, is_stored
):
    """Applies with or without an earlier run's choice. Another algorithm is always faster here."""
    monkeypatch.setattr(norms, "MIN_ELEMENTS", 1)
    found = []

    def other(race, guess, *_):
        found.append(guess)
        return Choice(next(name for name in race.algorithms if name != guess), guess, {})

    monkeypatch.setattr(tuner, "fastest", other)

    def trained(switch=lambda: None, **options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(8, 16, 3, groups=2), nn.BatchNorm2d(16), nn.Tanh(), nn.Flatten(2), nn.LayerNorm(64)
        )

        def loop(*arguments):
            switch()
            return fit(*arguments)

        train = nano(precision=precision, channels_last=True, verbose=False, **options)(loop)
        return train(model, torch.optim.SGD(model.parameters(), 0.01), torch.randn(4, 2, 8, 10, 10))

    expected = trained(tune_operators=False)
    if is_stored:
        trained()
        assert found
    found.clear()
    assert all(map(torch.equal, trained(deterministic), expected))
    assert not found


class Others:
    """The ranks of a run of two, whose broadcasts the test transports."""

    def __init__(self, rank, sent):
        self.rank, self.size, self.sent = rank, 2, sent
        self.context = RunContext()
        self.other_applies = True

    def gather(self, value):
        return [value, self.other_applies]

    def broadcast(self, value):
        if self.rank == 0:
            self.sent.append(value)
        return self.sent[-1]


def test_ranks_take_over_what_rank_0_knows_and_measures(monkeypatch, step):
    known, sent = Choices(None), []
    known.put("known", IN_FP32)
    monkeypatch.setattr(module, "choices_for", lambda machine: known)
    made = []
    for rank in range(2):
        each = step(TuneOperators, precision="bf16")
        each.ranks = Others(rank, sent)
        each.observe(TrainingObjects([nn.Linear(2, 2)]))
        each.apply(TrainingObjects([nn.Linear(2, 2)]))
        made.append(each)
    zero, one = (each._tuner for each in made)
    assert one.choices.all() == {"known": IN_FP32}
    assert one._budget.left(0.0) == 0
    zero.choices.put("new", IN_FP32)
    for averagings, expected in ((3, 1), (4, 2), (5, 2)):
        for each in made:
            for function in each.ranks.context.after_averaging:
                function(averagings)
        assert len(one.choices) == expected
    assert [len(each) for each in sent] == [1, 1]  # only new choices
    for each in made:
        each.undo()
        assert not each.ranks.context.after_averaging


@pytest.mark.parametrize(("precision", "other", "code"), [("bf16", False, "other_ranks"), (64, True, "not_bf16")])
def test_hosts_whose_cpus_differ_share_nothing_and_wait_for_nobody(step, precision, other, code):
    made = step(TuneOperators, precision=precision)
    made.ranks = Others(1, [])
    made.ranks.other_applies = other
    parts = TrainingObjects([nn.Linear(2, 2)])
    made.observe(parts)
    assert made.skip_reason(parts).code == code
    assert not made.ranks.context.after_averaging


@pytest.mark.parametrize("other", [True, False])
def test_ranks_in_fp32_measure_if_all_of_them_have_something_to_choose(step, other):
    made, parts = step(TuneOperators), TrainingObjects([nn.Linear(2, 2)])
    made.ranks = Others(1, [])
    assert made.is_relevant(parts)
    assert made.skip_reason(parts).code == "too_small"
    made.ranks.other_applies = other
    made.interceptors.for_model(parts.models[0]).rules = Rules(kernels=frozenset((norms.KERNEL.name,)))
    assert made.is_relevant(parts)
    assert made._has_choices == other
