"""A forecast of quantiles, with ReduceLROnPlateau on the validation loss, and a moving average of the weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import nano
from scripts.data import BATCH, waves

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def pinball(output, target):
    error = target - output
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


@nano
def train(model, ema_model, optimizer, scheduler, train_loader, val_loader, epochs):
    rates = []
    for _ in range(epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            pinball(model(x), y).backward()
            optimizer.step()
            ema_model.update_parameters(model)
        model.eval()
        with torch.no_grad():
            val = sum(float(pinball(model(x), y)) for x, y in val_loader) / len(val_loader)
        scheduler.step(val)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


torch.manual_seed(0)
series = waves(32, 20)
data = TensorDataset(series[:, :-1], series[:, -1:])
model = nn.Sequential(nn.Linear(19, 16), nn.ReLU(), nn.Linear(16, 3))
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
rates = train(model, ema_model, optimizer, scheduler, DataLoader(data, BATCH), DataLoader(data, 16), 6)
RESULT = {"model": model.state_dict(), "ema": ema_model.module.state_dict(), "rates": rates}
