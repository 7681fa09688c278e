"""A shared trunk with two heads, whose losses are weighted by parameters of the loss, in two groups of an optimizer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import nano
from scripts.data import BATCH, rows


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"value": nn.Linear(16, 1), "class": nn.Linear(16, 2)})

    def forward(self, x):
        shared = self.trunk(x)
        return {name: head(shared) for name, head in self.heads.items()}


class Uncertainty(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, losses):
        return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_vars, losses, strict=True))


@nano
def train(model, criterion, optimizer, loader, epochs):
    for _ in range(epochs):
        for x, value, label in loader:
            optimizer.zero_grad()
            out = model(x)
            losses = nn.functional.mse_loss(out["value"], value), nn.functional.cross_entropy(out["class"], label)
            criterion(losses).backward()
            optimizer.step()


torch.manual_seed(0)
x, y = rows().tensors
data = TensorDataset(x, y, (y[:, 0] > y.median()).long())
model, criterion = MultiTask(), Uncertainty()
groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.01, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.02)
train(model, criterion, optimizer, DataLoader(data, BATCH), 3)
RESULT = {"model": model.state_dict(), "log_vars": criterion.log_vars.detach()}
