"""Dropout draws the plain loop's masks, faster."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop.kernels.dropout import bernoulli
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernels.fast_dropout import FastDropout

X = torch.ones(64, 1024)
DROPS = TrainingObjects([nn.Dropout(0.5)])

same_draws = pytest.mark.skipif(
    bernoulli.KERNEL.unavailable is not None, reason=f"fast masks: {bernoulli.KERNEL.unavailable}"
)


@pytest.fixture
def filled(monkeypatch):
    """Count the masks that are drawn fast."""
    counts, fill = [], bernoulli.fill
    monkeypatch.setattr(bernoulli, "fill", lambda tensor, *rest: counts.append(tensor.numel()) or fill(tensor, *rest))
    return counts


def dropped(p=0.25):
    torch.manual_seed(1)
    return F.dropout(X, p), torch.rand(2)


@same_draws
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_masks_are_the_plain_loops_during_the_run_and_drawn_fast(step, filled, options):
    plain = dropped()
    made = step(FastDropout, **options)
    assert made.enabled
    assert made.skip_reason(DROPS) is None
    made.apply(DROPS)
    made.apply(DROPS)
    assert all(map(torch.equal, dropped(), plain))
    assert filled == [X.numel()]
    made.undo()
    dropped()
    assert filled == [X.numel()]


@same_draws
def test_gradient_meets_the_mask_of_the_forward(step):
    step(FastDropout).apply(DROPS)
    x = X.clone().requires_grad_()
    out = F.dropout(x, 0.5)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@same_draws
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_draws_the_same_mask_again(step, reentrant):
    step(FastDropout).apply(DROPS)
    x = X.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=reentrant)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * out.detach())
