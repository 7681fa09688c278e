"""Cross-entropy of split batches: which calls return the mean over the rows of all ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils.data import DataLoader, TensorDataset

from distributed.small import OPTIONS
from distributed.split_batches.loops import Plain, needs_kernels, weights
from nano_loop import TorchNano
from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.distributed.data_parallel.mean_losses import means_over_all_ranks
from nano_loop.kernels.head.layers import KERNEL

pytestmark = needs_kernels


def with_share(ranks, compute, total=5):
    """Return the result of `compute` for this rank's rows, and their gradient, weighted by the share."""
    rows, target = torch.arange(15.0).view(5, 3).sin().double(), torch.tensor([0, -100, 2, 1, -100])
    share = Share.of(total, ranks.rank, ranks.size)
    split = ranks.context.split = SplitBatches()
    split.deliver(compute, share)
    own = slice(share.start, share.stop)
    leaf = rows[own].clone().requires_grad_()
    with means_over_all_ranks(ranks):
        loss = compute(leaf, target[own])
    if loss.requires_grad:
        (loss * split.begin_backward() / ranks.size).backward()
    return loss.detach(), leaf.grad


def plain(compute):
    leaf = torch.arange(15.0).view(5, 3).sin().double().requires_grad_()
    loss = compute(leaf, torch.tensor([0, -100, 2, 1, -100]))
    loss.backward()
    return loss.detach(), leaf.grad


MEANS = {
    "cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "module": lambda x, y: torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double(), label_smoothing=0.1)(x, y),
    "nll_loss": lambda x, y: F.nll_loss(x.log_softmax(1), y, weight=torch.tensor([0.5, 0.0, 1.0]).double()),
    "another padding": lambda x, y: F.cross_entropy(x, y.clamp(min=0), ignore_index=0),
    "imported before": lambda x, y: cross_entropy(x, y) + nll_loss(x.log_softmax(1), y),
    "bytes": lambda x, y: nll_loss(x, y.clamp(min=0).byte(), weight=torch.tensor([0.5, 1.0, 2.0]).double()),
    "padded bytes": lambda x, y: cross_entropy(x, y.clamp(min=0).byte(), ignore_index=0),
    "of 1-d samples": lambda x, y: cross_entropy(x.unsqueeze(2).expand(-1, -1, 4), y.unsqueeze(1).expand(-1, 4)),
    "probabilities": lambda x, y: cross_entropy(x, x.detach().softmax(1)),
    "in a function": lambda x, y: F.cross_entropy(x, y).exp() + x.square().mean(),
}


@pytest.mark.parametrize("name", MEANS)
def test_value_and_gradient_are_those_of_the_whole_batch(team, name):
    loss, gradient = plain(MEANS[name])
    by_rank = team(3)(with_share, MEANS[name])
    weighted = sum(Share.of(5, rank, 3).weight * value for rank, (value, _) in enumerate(by_rank)) / 3
    torch.testing.assert_close(weighted, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([own for _, own in by_rank]), gradient, rtol=1e-12, atol=1e-15)
    if name != "in a function":
        assert len({float(value) for value, _ in by_rank}) == 1


def test_batch_without_a_row_that_counts_is_nan_as_in_torch(team):
    def ignored(x, y):
        return F.cross_entropy(x, torch.full_like(y, -100))

    for loss, gradient in team(2)(with_share, ignored):
        assert loss.isnan()
        assert not gradient.any()


ALONE = {
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "by hand": lambda x, y: sum(F.cross_entropy(one, label, reduction="none") for one, label in zip(x, y, strict=True)),
    "a sample": lambda x, y: sum(F.cross_entropy(one, label * 0) for one, label in zip(x, y, strict=True)),
    "of functorch": lambda x, y: torch.func.grad(lambda rows: F.cross_entropy(rows, y))(x.detach()).sum(),
    "no_grad": torch.no_grad()(lambda x, y: F.cross_entropy(x, y)),
    "data": lambda x, y: F.cross_entropy(x.detach(), y),
}


@pytest.mark.parametrize("name", ALONE)
def test_other_losses_are_computed_by_a_rank_alone(team, name):
    def alone(ranks):
        return with_share(ranks, ALONE[name]) if ranks.rank == 1 else None

    _, (loss, _) = team(2)(alone)
    x, y = torch.arange(15.0).view(5, 3).sin().double()[3:], torch.tensor([1, -100])
    assert loss == ALONE[name](x, y)


def test_batch_that_all_ranks_compute_whole_is_torchs(team):
    def alone(ranks):
        return with_share(ranks, MEANS["cross_entropy"], total=1) if ranks.rank == 1 else None

    team(2)(alone)


class Reader(nn.Module):
    """Has a head with enough classes to be computed in chunks, without logits."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 8192)

    def forward(self, words):
        return self.head(self.words(words))


def read(run):
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    run.setup(model, optimizer)
    words = torch.randint(1, 50, (18, 260)) * (torch.arange(260) < torch.randint(20, 260, (18, 1)))
    losses = []
    for (batch,) in DataLoader(TensorDataset(words), 9):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch)[:, :-1].reshape(-1, 8192), batch[:, 1:].reshape(-1) * 37, ignore_index=0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), weights(model).detach()


class Shared(TorchNano):
    def train(self):
        return (*read(self), KERNEL.calls)


@pytest.mark.slow
def test_loss_of_a_head_without_logits_is_that_of_the_whole_batch():
    run = Shared(**OPTIONS, split_batches=True)
    *results, calls = run.train()
    for one, other in zip(results, read(Plain()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert calls
    assert run.report["split_batches"].status == "applied"


def test_compiled_code_computes_the_loss_by_all_ranks(team):
    """Dynamo would trace the original function, which does not know of other ranks."""

    def compute(x, y):
        def doubled(x, y):
            return cross_entropy(x * 2, y) * 2

        return torch.compile(doubled, backend="aot_eager")(x, y)

    loss, gradient = plain(lambda x, y: cross_entropy(x * 2, y) * 2)
    by_rank = team(2)(with_share, compute)
    assert all(torch.isclose(value, loss, rtol=1e-12) for value, _ in by_rank)
    torch.testing.assert_close(torch.cat([own for _, own in by_rank]), gradient, rtol=1e-12, atol=1e-15)
