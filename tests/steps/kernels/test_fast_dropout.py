"""Dropout draws the plain loop's masks, but faster, wherever it is called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import accelerated
from nano_loop.kernels import bernoulli
from nano_loop.runtime.objects.training_objects import TrainingObjects
from steps.kernels.cases import BY_NAME

X = torch.ones(64, 1024)
DROPS = TrainingObjects([nn.Dropout(0.5)])

same_draws = pytest.mark.skipif(
    bernoulli.KERNEL.unavailable is not None, reason=f"fast masks: {bernoulli.KERNEL.unavailable}"
)


def dropped(p=0.25):
    torch.manual_seed(1)
    return F.dropout(X, p), torch.rand(2)


@same_draws
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_masks_are_the_plain_loops_during_the_run_and_drawn_fast(step, filled, options):
    plain = dropped()
    made = step(BY_NAME["fast_dropout"], **options)
    assert made.enabled
    assert made.skip_reason(DROPS) is None
    made.apply(DROPS)
    made.apply(DROPS)
    assert all(map(torch.equal, dropped(), plain))
    assert filled == [X.numel()]
    made.undo()
    dropped()
    assert filled == [X.numel()]


class Calls(nn.Module):
    """Calls a function that does not occur in its code."""

    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function(x * self.scale)


def attended(x):
    heads = x.view(2, 4, 64, 128)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)


#: Calls of dropout in a forward, and the number of random values of each.
CALLS = {
    "function": (F.dropout, [X.numel()]),
    "in place": (lambda x: F.dropout(x, 0.3, inplace=True), [X.numel()]),
    "operator": (lambda x: torch.dropout(x, 0.3, True), [X.numel()]),
    "channels": (lambda x: F.dropout2d(x.view(64, 256, 2, 2), 0.3), [X.numel() // 4]),
    "alpha": (lambda x: F.alpha_dropout(x, 0.3, training=True), [X.numel()]),
    "alpha of channels": (lambda x: F.feature_alpha_dropout(x, 0.3, training=True), [X.numel()]),
    "attention": (attended, [2 * 4 * 64 * 64]),
    "of nothing": (lambda x: F.dropout(x, 0.0), []),
    "of all": (lambda x: F.dropout(x, 1.0), []),
    "in evaluation": (lambda x: F.dropout(x, 0.3, training=False), []),
}


@same_draws
@pytest.mark.parametrize("precision", [32, "bf16"])
@pytest.mark.parametrize(("function", "counts"), CALLS.values(), ids=CALLS)
def test_it_applies_wherever_dropout_is_called(filled, function, counts, precision):
    def results(model):
        torch.manual_seed(1)
        x = torch.rand(64, 1024).requires_grad_()
        out = model(x)
        out.float().square().sum().backward()
        return torch.get_rng_state(), out.detach(), x.grad

    plain = results(Calls(function))
    assert filled == []
    with accelerated(model := Calls(function), precision=precision, verbose=False) as run:
        assert run.report["fast_dropout"].code == "no_dropout"
        state, *others = results(model)
    assert filled == counts
    assert (run.report["fast_dropout"].status == "applied") == bool(counts)
    assert torch.equal(state, plain[0])
    if precision == 32:
        assert all(map(torch.equal, others, plain[1:]))
