"""SparseAdam does what torch's SparseAdam and Adam do, for their kinds of gradients; after torch's own tests."""

import copy
import io

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.optim import SparseAdam


def parameter(*shape, seed=0):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def sparse(rows, shape, seed):
    values = torch.randn(len(rows), *shape[1:], generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


ROWS = [[0, 3], [3, 3, 5], [1], [0, 1, 2, 3, 4, 5], []]


def stepped(optimizer, one, gradients):
    for gradient in gradients:
        one.grad = gradient.clone()
        optimizer.step()
    return one.detach()


OPTIONS = [{}, {"lr": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-4}, {"maximize": True}, {"lr": torch.tensor(0.05)}]


@pytest.mark.parametrize("options", OPTIONS)
def test_sparse_gradients_are_stepped_as_by_torch_s_sparse_adam(options):
    gradients = [sparse(rows, (6, 3), seed) for seed, rows in enumerate(ROWS)]
    ours, theirs = parameter(6, 3), parameter(6, 3)
    found = stepped(SparseAdam([ours], **options), ours, gradients)
    expected = stepped(torch.optim.SparseAdam([theirs], **options), theirs, gradients)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_dense_gradients_are_stepped_as_by_torch_s_adam(options):
    gradients = [torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    ours, theirs = parameter(6, 3), parameter(6, 3)
    found = stepped(SparseAdam([ours], **options), ours, gradients)
    expected = stepped(torch.optim.Adam([theirs], **options), theirs, gradients)
    assert torch.equal(found, expected)


def test_gradients_with_two_sparse_dimensions_are_stepped_too():
    places, values = torch.tensor([[0, 2, 2], [1, 0, 0]]), torch.tensor([1.0, 2.0, 3.0])
    gradient = torch.sparse_coo_tensor(places, values, (3, 2), check_invariants=True)
    ours, theirs = parameter(3, 2), parameter(3, 2)
    found = stepped(SparseAdam([ours]), ours, [gradient] * 3)
    torch.testing.assert_close(found, stepped(torch.optim.SparseAdam([theirs]), theirs, [gradient] * 3))


def test_gradients_may_become_dense_and_sparse_again():
    one = parameter(6, 3)
    optimizer = SparseAdam([one])
    for seed, dense in enumerate((False, True, False)):
        gradient = sparse(ROWS[0], (6, 3), seed)
        one.grad = gradient.to_dense() if dense else gradient
        optimizer.step()
    assert optimizer.state[one]["step"].item() == 3


class Recommender(nn.Module):
    """Embeddings with sparse gradients, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.embedding(x)).squeeze(-1)


def train(model, optimizer, steps=60):
    x = torch.arange(7)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_it_is_accelerated_like_any_other_optimizer():
    torch.manual_seed(0)
    model = Recommender()
    twin = copy.deepcopy(model)
    decorated = nano(verbose=False)(train)
    found = decorated(model, SparseAdam(model.parameters(), lr=0.1), 5)
    assert found == train(twin, SparseAdam(twin.parameters(), lr=0.1), 5)
    assert "SparseAdam" in decorated.report["fused_optimizer"].detail


def test_training_is_resumed_from_a_checkpoint():
    torch.manual_seed(0)
    model = Recommender()
    optimizer = SparseAdam(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    twin = copy.deepcopy(model)
    resumed, file = SparseAdam(twin.parameters()), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    assert train(model, optimizer, 3) == train(twin, resumed, 3)


def test_checkpoint_of_torch_s_sparse_adam_is_resumed():
    gradients = [sparse(rows, (6, 3), seed) for seed, rows in enumerate(ROWS)]
    theirs = parameter(6, 3)
    saved = torch.optim.SparseAdam([theirs])
    stepped(saved, theirs, gradients)
    ours = nn.Parameter(theirs.detach().clone())
    optimizer = SparseAdam([ours])
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    torch.testing.assert_close(stepped(optimizer, ours, gradients), stepped(saved, theirs, gradients))


def test_groups_have_their_own_rates_and_parameters_without_gradients_stay():
    one, other, idle = parameter(2), parameter(2), parameter(2)
    optimizer = SparseAdam([{"params": [one], "lr": 0.5}, {"params": [other, idle]}])
    before = one.detach().clone(), other.detach().clone(), idle.detach().clone()
    one.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    moved = [float((b - a.detach()).abs().max()) for a, b in zip((one, other, idle), before, strict=True)]
    assert moved == pytest.approx([0.5, 1e-3, 0], rel=1e-3)
