"""Five folds over a table: a call of the train function for each."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from nano_loop import nano
from scripts.data import BATCH, rows


@nano
def train(model, optimizer, loader, epochs=4):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def evaluate(model, loader):
    with torch.no_grad():
        return sum(nn.functional.mse_loss(model(x), y, reduction="sum").item() for x, y in loader)


def cross_validate(dataset, k):
    folds = torch.arange(len(dataset)).chunk(k)
    for fold in range(k):
        torch.manual_seed(fold)
        held_out = folds[fold].tolist()
        others = [i for other in range(k) if other != fold for i in folds[other].tolist()][:64]
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        train(model, optimizer, DataLoader(Subset(dataset, others), BATCH))
        yield evaluate(model, DataLoader(Subset(dataset, held_out), 8))


RESULT = {"losses": list(cross_validate(rows(), 5))}
