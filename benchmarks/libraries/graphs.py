"""Graphs by PyTorch Geometric."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.libraries.programs import Fit, Trained, program


@program("torch-geometric", "GCN, trained by Adam")
def gcn(small: bool) -> Fit:
    """GCN on the nodes of a graph."""
    from torch_geometric.nn.models import GCN

    nodes, width, edges, epochs = (500, 32, 4000, 10) if small else (2708, 1433, 10556, 60)
    random = torch.Generator().manual_seed(0)
    classes = torch.randint(7, (nodes,), generator=random)
    features = torch.randn(nodes, width, generator=random) + classes[:, None]
    links = torch.randint(nodes, (2, edges), generator=random)
    model = GCN(width, 64, num_layers=2, out_channels=7, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)

    def fit() -> Trained:
        model.train()
        for _ in range(epochs):
            loss = nn.functional.cross_entropy(model(features, links), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return Trained([model], loss.item())

    return fit


@program("torch-geometric", "Classifier, trained by Adam")
def gin(small: bool) -> Fit:
    """GIN on batches of graphs."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import global_add_pool
    from torch_geometric.nn.models import GIN, MLP

    class Classifier(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = GIN(16, width, num_layers=4)
            self.head = MLP([width, width, 2], dropout=0.5, norm=None)

        def forward(self, graphs: Data) -> torch.Tensor:
            outputs = self.layers(graphs.x, graphs.edge_index)
            logits: torch.Tensor = self.head(global_add_pool(outputs, graphs.batch))
            return logits

    random = torch.Generator().manual_seed(0)

    def graph(number: int) -> Data:
        features = torch.randn(30, 16, generator=random) + number % 2
        return Data(x=features, edge_index=torch.randint(30, (2, 120), generator=random), y=torch.tensor(number % 2))

    graphs = [graph(number) for number in range(64 if small else 1024)]
    model = Classifier(16 if small else 128)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader(graphs, 32 if small else 64, shuffle=True)

    def fit() -> Trained:
        for _ in range(1 if small else 4):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return Trained([model], loss.item())

    return fit
