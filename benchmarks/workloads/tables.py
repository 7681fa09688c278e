"""Tabular data: a small perceptron, for which the overhead around the arithmetic takes most of the time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads.workload import Workload


def mlp(small: bool) -> Workload:
    """Three linear layers on batches of 128 rows of 64 numbers, from a `DataLoader` over 16,384 rows; AdamW."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(16384, 64), torch.randint(10, (16384,)))
    loader = DataLoader(data, 128, shuffle=True)
    return Workload(
        model,
        optimizer,
        loader,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        steps=(2 if small else 8) * len(loader),
    )
