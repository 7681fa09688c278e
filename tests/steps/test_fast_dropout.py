"""Dropout draws its masks fast, where it pays and where nobody expects the plain loop's."""

import dataclasses
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop.kernels import bernoulli as random_masks
from nano_loop.parts import Parts
from nano_loop.steps.fast_dropout import FastDropout

X = torch.ones(64, 1024)
DROPS = Parts([nn.Dropout(0.5)])


@pytest.fixture
def large_draws(monkeypatch):
    """Count the masks that the fast generator draws."""
    counts, draw = [], random_masks._mask
    monkeypatch.setattr(random_masks, "_mask", lambda count, *rest: counts.append(count) or draw(count, *rest))
    return counts


def test_dropout_uses_it_during_the_run_only(step, large_draws):
    made = step(FastDropout, precision="bf16")
    assert made.skip_reason(DROPS) is None
    made.apply(DROPS)
    made.apply(DROPS)
    dropped = F.dropout(X, 0.25)
    assert large_draws == [X.numel()]
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(dropped.eq(0).float().mean() - 0.25) < 0.01
    made.undo()
    F.dropout(X, 0.25)
    assert large_draws == [X.numel()]


def test_threads_that_draw_end_with_the_run(step):
    made = step(FastDropout, precision="bf16")
    before = threading.active_count()
    made.apply(DROPS)
    F.dropout(torch.ones(3 << 18), 0.5)
    assert threading.active_count() == before + torch.get_num_threads() - 1 or torch.get_num_threads() == 1
    made.undo()
    assert threading.active_count() == before


def test_gradient_meets_the_mask_of_the_forward(step):
    step(FastDropout, precision="bf16").apply(DROPS)
    x = X.clone().requires_grad_()
    dropped = F.dropout(x, 0.5)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_draws_the_same_mask_again(step, reentrant):
    step(FastDropout, precision="bf16").apply(DROPS)
    x = X.clone().requires_grad_()
    dropped = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=reentrant)
    dropped.sum().backward()
    assert torch.equal(x.grad, 2 * dropped.detach())


@pytest.mark.parametrize(
    "model",
    [
        nn.Dropout(0.1),
        nn.LSTM(2, 2, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.Sequential(nn.Dropout2d(0.2)),
    ],
)
def test_models_that_drop_are_recognised(step, model):
    assert step(FastDropout, precision="bf16").skip_reason(Parts([model])) is None


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Dropout(0.0), nn.LSTM(2, 2)])
def test_models_that_do_not_are_skipped(step, model):
    assert step(FastDropout, precision="bf16").skip_reason(Parts([model])) == "the model has no dropout"


def test_fp32_is_left_alone_in_silence_unless_asked_for(step):
    assert not step(FastDropout).asked
    assert step(FastDropout, fast_dropout=True).asked
    assert step(FastDropout, fast_dropout=True).skip_reason(Parts([nn.Linear(2, 2)])) is None


def test_precision_that_turns_out_to_be_fp32_is_a_reason(step, machine):
    made = step(FastDropout, on=machine(instruction_sets=()), precision="auto")
    assert made.skip_reason(DROPS) == "fp32 keeps the masks of the plain loop"


def test_intels_vectorised_generator_is_a_reason(step, machine):
    intel = dataclasses.replace(machine(), name="Intel Xeon Gold 6338")
    assert "Intel" in step(FastDropout, on=intel, precision="bf16").skip_reason(DROPS)
