"""Weights of samples in a loss, and operators that combine samples, are known from the loss's graph."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nano_loop import NanoWarning
from nano_loop.distributed.data_parallel.loss_graph import OVER_ALL_RANKS
from nano_loop.distributed.data_parallel.sample_weights import SampleWeights

MODEL = nn.Linear(3, 1)
TOTAL = 11


def errors(count, seed=0):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return (MODEL(x)[:, 0] - x.sum(1)).square()


def marked(loss):
    loss.grad_fn.metadata[OVER_ALL_RANKS] = True
    return loss


def rows(losses):
    """Return vectors with the factors of samples."""
    return losses[:, None] * torch.arange(1.0, 5.0)


def backward(weights, loss, weight=1.0, samples=0):
    weights.watch([loss], weight, samples)
    loss.backward(torch.full_like(loss, weight))
    return weights.take()


def of_ranks(loss_of, counts=(6, 5), weights=None):
    """Return the weights of each rank, of which the first keeps the operators."""
    parts = [2 * count / sum(counts) for count in counts]
    keepers = [weights or SampleWeights(), SampleWeights()]
    return [
        backward(keeper, loss_of(errors(count, count)), part, count)
        for keeper, count, part in zip(keepers, counts, parts, strict=True)
    ]


def warned(weights, by_rank, *, is_compared=False):
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        weights.compare(by_rank, 1e-3, is_compared=is_compared)
    assert all(issubclass(one.category, NanoWarning) for one in issued)
    return [str(one.message) for one in issued]


EQUAL = {
    "mean": lambda e: e.mean(),
    "function": lambda e: F.mse_loss(e, torch.zeros(len(e))),
    "sum by count": lambda e: e.sum() / len(e),
    "heads": lambda e: 0.7 * e.mean() + 0.3 * e.sqrt().mean() + 0.1 * MODEL.weight.norm(),
    "each sample": lambda e: sum(e) / len(e),
    "squares of many samples": lambda e: sum(one.square() for one in e.repeat_interleave(2)) / len(e),
    "share of a count of all ranks": lambda e: e[:4].sum() / 8 / (len(e) / TOTAL),
    "mean over all ranks": lambda e: 3 * marked(e[: len(e) // 2].mean()),
    "stacked": lambda e: torch.stack([e.mean(), e[:4].mean()]).sum(),
    "other data": lambda e: e.mean() + errors(4).mean(),
    "off": lambda e: 0 * e.mean(),
    "mean of vectors": lambda e: (3 * rows(e).mean(0) * torch.arange(4.0)).sum(),
    "mean of sums": lambda e: rows(e).sum((0, -1)) / len(e),
    "sum of vectors by count": lambda e: rows(e).sum(-2).mean() / len(e),
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("counts", [(6, 5), (6, 6)])
def test_losses_that_weight_samples_equally(name, counts):
    weights = SampleWeights()
    assert warned(weights, of_ranks(EQUAL[name], counts, weights)) == []


DIFFERENT = {
    "filtered": lambda e: e[: len(e) - 3].mean(),
    "filtered by weights": lambda e: (e * (e > e[0])).sum() / (e > e[0]).sum().clamp(min=1),
    "root": lambda e: e.mean().sqrt(),
    "sum": lambda e: e.sum(),
    "sum by a constant": lambda e: e.sum() / TOTAL,
    "ratio": lambda e: e.sum() / (e.detach() + 1).sum(),
    "own value": lambda e: e.mean() / e.mean().detach(),
    "squared mean of vectors": lambda e: rows(e).mean(0).square().sum(),
    "ratios of sums of vectors": lambda e: (rows(e).sum(-2) / (rows(e.square()).sum(0) + 1)).mean(),
    "entropy of a mean": lambda e: rows(e).sin().softmax(1).mean(0, keepdim=True).log().mean(),
    "only one rank's": lambda e: e.mean() + (0.5 * e.sqrt().mean() if len(e) == 6 else 0),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_losses_that_weight_samples_differently(name):
    weights = SampleWeights()
    (message,) = warned(weights, of_ranks(DIFFERENT[name], weights=weights))
    assert "weights samples differently on each rank, by [[" in message
    assert "share()" in message
    assert warned(weights, of_ranks(DIFFERENT[name], weights=weights)) == []  # once


def test_weights_that_differ_in_compared_gradients_are_not_checked():
    """The loop may have weighted them itself by the number of all ranks' samples."""
    weights = SampleWeights()
    own = DIFFERENT["filtered"]
    assert warned(weights, of_ranks(own, weights=weights), is_compared=True) == []
    assert warned(weights, of_ranks(own, weights=weights)) == []


@pytest.mark.parametrize("loss_of", [lambda e: e.topk(3)[0].mean(), lambda e: e.mean() + (e[:, None] @ e[None]).mean()])
def test_operators_that_combine_samples_later_are_named(loss_of):
    weights = SampleWeights()
    assert warned(weights, of_ranks(EQUAL["heads"], (6, 6), weights), is_compared=True) == []
    assert warned(weights, of_ranks(EQUAL["mean"], (6, 6), weights)) == []
    (message,) = warned(weights, of_ranks(loss_of, (6, 6), weights))
    assert "combines samples since the first step, by " in message


COMBINED = {
    "deviation": lambda e: rows(e).std(0).mean(),
    "norm": lambda e: e.norm(),
    "probabilities of samples": lambda e: (e.softmax(0) * torch.arange(6.0)).sum(),
    "turned around": lambda e: (e * e.flip(0)).mean(),
    "distances of pairs": lambda e: F.pdist(rows(e)).mean(),
    "distances": lambda e: torch.cdist(rows(e), rows(e)).mean(),
}
if hasattr(torch._C._functions, "AminmaxBackward0"):  # torch 2.8 has no derivative
    COMBINED["range"] = lambda e: e.aminmax()[1]


@pytest.mark.parametrize("name", COMBINED)
def test_operators_whose_factor_was_zero_in_compared_losses_are_named(name):
    weights = SampleWeights()
    for factor, is_compared, count in ((0.0, True, 0), (0.0, False, 0), (0.5, False, 1)):
        by_rank = of_ranks(lambda e, factor=factor: e.mean() + factor * COMBINED[name](e), (6, 6), weights)
        assert len(warned(weights, by_rank, is_compared=is_compared)) == count


WITHIN_ROWS = {
    "deviation": lambda e: rows(e).std(-1).mean(),
    "norm": lambda e: F.normalize(rows(e), dim=1)[:, 0].mean(),
    "best class": lambda e: rows(e).max(1)[0].mean(),
    "sorted classes": lambda e: rows(e).topk(2)[0].sum(1).mean(),
    "probabilities of classes": lambda e: rows(e).softmax(1)[:, 0].mean(),
    "turned around": lambda e: (rows(e) * rows(e).flip(1)).mean(),
    "clipped": lambda e: torch.maximum(e, torch.tensor(0.3)).mean(),
    "selected": lambda e: e[torch.ones(len(e), dtype=torch.bool)].mean(),
    "selected columns": lambda e: rows(e)[rows(e) > -1].mean(),
    "chosen class of words": lambda e: rows(e.repeat(2)).gather(1, torch.zeros(12, 1, dtype=torch.long)).mean(),
}


@pytest.mark.parametrize("name", WITHIN_ROWS)
def test_operators_within_the_rows_of_samples_combine_none(name):
    weights = SampleWeights()
    assert warned(weights, of_ranks(EQUAL["mean"], (6, 6), weights), is_compared=True) == []
    assert warned(weights, of_ranks(WITHIN_ROWS[name], (6, 6), weights)) == []


def test_operators_of_compared_losses_are_none_of_them():
    weights = SampleWeights()
    assert warned(weights, of_ranks(lambda e: e.topk(3)[0].mean(), (6, 6), weights), is_compared=True) == []
    assert warned(weights, of_ranks(lambda e: e.topk(4)[0].mean(), (6, 6), weights)) == []


def test_lines_that_combine_samples_later_are_named():
    weights = SampleWeights()
    equal = of_ranks(EQUAL["mean"], (6, 6), weights)
    weights._lines.add("flip in a.py:1")
    assert warned(weights, equal, is_compared=True) == []
    weights._lines.add("flip in a.py:1")
    assert warned(weights, equal) == []
    weights._lines.add("roll in a.py:4")
    (message,) = warned(weights, equal)
    assert "combines samples since the first step, by roll in a.py:4" in message
    weights._lines.add("roll in a.py:5")
    assert warned(weights, equal) == []  # once


def test_operators_of_a_backward_that_reaches_no_parameter_are_forgotten():
    weights = SampleWeights()
    assert warned(weights, of_ranks(EQUAL["mean"], (6, 6), weights), is_compared=True) == []
    of_ranks(lambda e: e.topk(3)[0].mean(), (6, 6), weights)
    assert warned(weights, of_ranks(EQUAL["mean"], (6, 6), weights)) == []


CHANGED = {
    "own gradient": (lambda gradient: gradient, 0),
    "a constant factor": (lambda gradient: 0.1 * gradient, 0),
    "weight decay": (lambda gradient: gradient + 0.1 * MODEL.weight.detach(), 0),
    "clipped": (lambda gradient: gradient * (0.1 / gradient.norm()).clamp(max=1), 1),
    "clipped in place": (lambda gradient: gradient.mul_(0.1 / gradient.norm()), 1),
}


@pytest.mark.parametrize("name", CHANGED)
def test_factors_of_own_gradients_are_compared(name):
    change, count = CHANGED[name]
    by_rank = []
    for samples in (6, 5):
        weights = SampleWeights()
        gradients = torch.autograd.grad(errors(samples, samples).mean(), [MODEL.weight])
        weights.note_computed([MODEL.weight], gradients)
        MODEL.weight.grad = change(*gradients)
        weights.note_scaled([MODEL.weight, MODEL.bias])
        by_rank.append(weights.take())
    MODEL.weight.grad = None
    messages = warned(SampleWeights(), by_rank)
    assert len(messages) == count
    assert all("weights samples differently on each rank" in message for message in messages)


def test_mean_of_no_elements_has_a_weight():
    weights = SampleWeights()
    (weight,) = backward(weights, errors(3)[:0].mean())
    assert weight.elements == 0


def test_of_many_backwards_one_in_ten_is_checked():
    weights = SampleWeights()
    found = [bool(backward(weights, errors(3).mean())) for _ in range(120)]
    assert found == [True] * 100 + [number % 10 == 0 for number in range(101, 121)]
