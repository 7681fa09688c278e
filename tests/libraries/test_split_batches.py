"""PyG graphs whose batches are split among ranks: the weights are the plain loop's."""

import warnings

import pytest
import torch
from distributed.small import OPTIONS
from distributed.split_batches.loops import Plain, needs_kernels, weights
from distributed.split_batches.test_loops import of_team
from torch.nn import functional as F

from nano_loop import TorchNano

geometric = pytest.importorskip("torch_geometric")

from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.nn import GCNConv, global_mean_pool  # noqa: E402


class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 3)

    def forward(self, graphs):
        states = self.first(graphs.x, graphs.edge_index).relu()
        return global_mean_pool(self.second(states, graphs.edge_index), graphs.batch)


def ring(nodes):
    """Return a graph with the given number of nodes. Its class follows from their features."""
    x = torch.randn(nodes, 4, dtype=torch.float64)
    places = torch.arange(nodes)
    edges = torch.stack([torch.cat([places, places.roll(1)]), torch.cat([places.roll(1), places])])
    return Data(x=x, edge_index=edges, y=x[:, 0].sum().gt(0).long().unsqueeze(0))


def fit(run):
    torch.manual_seed(0)
    model = Graphs().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader([ring(3 + number % 5) for number in range(37)], batch_size=9, shuffle=True)
    run.setup(model, optimizer)
    losses = []
    for _ in range(4):
        for graphs in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(graphs), graphs.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return weights(model), torch.tensor(losses, dtype=torch.float64)


class Shared(TorchNano):
    def train(self):
        return fit(self)


def assert_equal(found, plain):
    for one, expected in zip(found, plain, strict=True):
        assert (one - expected).abs().max() <= 1e-12 * expected.abs().max()


@needs_kernels
def test_graphs_of_pyg_are_shared():
    with warnings.catch_warnings():  # PyG's table of functions by operator is not compared
        warnings.filterwarnings("ignore", r"torch_geometric\.index\.HANDLED_FUNCTIONS")
        shared = Shared(**OPTIONS, split_batches=True).train()
    assert_equal(shared, fit(Plain()))


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_graphs_of_pyg_are_shared_by_more_ranks(team, size):
    for found in team(size)(of_team, fit):
        assert_equal(found, fit(Plain()))
