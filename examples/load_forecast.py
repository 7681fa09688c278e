"""Forecast tomorrow's electricity demand, hour by hour, with a GRU: `@nano` on an existing training loop.

    python examples/load_forecast.py                     # accelerated
    python examples/load_forecast.py --plain             # the same loop without nano_loop
    python examples/load_forecast.py --precision 32 --epochs 2

The demand is synthetic: it depends on hour, weekday and season, and on weather that lasts for days.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Forecast a day of electricity demand with a GRU.")
parser.add_argument("--plain", action="store_true", help="run the same loop without nano_loop")
parser.add_argument("--precision", default="auto", help="32, bf16 or auto (default: auto)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=128, help="units of each of the two layers (default: 128)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
args = parser.parse_args()

precision = 32 if args.precision == "32" else args.precision
week, day = 7 * 24, 24
years, test_days = 2, 60

if args.plain:

    def nano(**options):
        """Replace the decorator for `--plain`: return the function unchanged."""
        return lambda function: function
else:
    from nano_loop import nano


class Forecaster(nn.Module):
    """Map the hours of a week (N, 168, 5) to the demand of the next day (N, 24), as the change from a week before."""

    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(5, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, day)

    def forward(self, hours):
        states, _ = self.gru(hours)
        return hours[:, :day, 0] + self.head(states[:, -1])


def demand():
    """Return a (hours, 5) tensor: the normalized demand of each hour, and the position of the hour in day and week."""
    hours = torch.arange(years * 365 * day)
    of_day, of_week, of_year = (2 * torch.pi * hours / period for period in (day, week, 365 * day))
    weather = torch.zeros(len(hours))
    for hour, gust in enumerate(torch.randn(len(hours)).tolist()):
        weather[hour] = 0.99 * weather[hour - 1] + 0.14 * gust
    seasons = -of_day.cos() + 0.5 * (2 * of_day).sin() + 0.3 * of_week.sin() + 0.5 * of_year.cos()
    calendar = [of_day.sin(), of_day.cos(), of_week.sin(), of_week.cos()]
    return torch.stack([seasons + 0.4 * weather, *calendar], dim=1)


def windows(series, every):
    """Return a dataset of weeks, each with the demand of the following day."""
    pairs = series.unfold(0, week + day, every).transpose(1, 2)
    return TensorDataset(pairs[:, :week].contiguous(), pairs[:, week:, 0].contiguous())


@torch.no_grad()
def error(model, loader):
    """Return the mean absolute error of a forecast."""
    model.eval()
    total = sum((model(hours) - target).abs().mean(dim=1).sum().item() for hours, target in loader)
    model.train()
    return total / len(loader.dataset)


@nano(precision=precision)
def train(model, optimizer, scheduler, train_loader, test_loader, epochs):
    """Train for some epochs and return the error on the test set after the last one."""
    test_error = error(model, test_loader)
    for epoch in range(epochs):
        for hours, target in train_loader:
            loss = F.l1_loss(model(hours), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        test_error = error(model, test_loader)
        print(f"epoch {epoch + 1}: test error {test_error:.3f}", flush=True)
    return test_error


torch.manual_seed(args.seed)
series = demand()
past, recent = series[: -test_days * day], series[-test_days * day - week :]
train_loader = DataLoader(windows(past, every=3), args.batch_size, shuffle=True)
test_loader = DataLoader(windows(recent, every=day), args.batch_size)
hours, target = test_loader.dataset.tensors
week_before = (hours[:, :day, 0] - target).abs().mean().item()

model = Forecaster(args.width)
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))

start = time.perf_counter()
test_error = train(model, optimizer, scheduler, train_loader, test_loader, args.epochs)
seconds = time.perf_counter() - start

print(f"test error {test_error:.3f}, of the week before {week_before:.3f}, after {seconds:.1f} s of training")
if args.json:
    args.json.write_text(json.dumps({"seconds": seconds, "error": test_error, "week before": week_before}))
