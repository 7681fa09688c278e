"""A `main` that builds model, optimizer and loaders itself, rewritten as a `TorchNano` as our error advises."""

import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split

import nano_loop
from scripts.data import BATCH


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.rnn, self.head = nn.GRU(1, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1])


def evaluate(model, loader, criterion):
    model.eval()
    with torch.no_grad():
        losses = [criterion(model(wave[:, :-1]), wave[:, -1:]).item() for wave in loader]
    return sum(losses) / len(losses)


class Main(nano_loop.TorchNano):
    def train(self, args):
        torch.manual_seed(args.seed)
        train_set, val_set = random_split(torch.sin(torch.arange(20) * 0.5 + torch.arange(48)[:, None] * 0.3), [32, 16])
        train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
        val_loader = DataLoader(val_set, 8)
        model = Forecaster(args.hidden)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        model, optimizer, [train_loader, val_loader] = self.setup(model, optimizer, train_loader, val_loader)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
        criterion, best, history = nn.SmoothL1Loss(), float("inf"), []
        for epoch in range(args.epochs):
            model.train()
            for steps, wave in enumerate(train_loader, 1):  # noqa: B007 - printed below
                optimizer.zero_grad()
                loss = criterion(model(wave[:, :-1]), wave[:, -1:])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
            val_loss = evaluate(model, val_loader, criterion)
            scheduler.step(val_loss)
            history.append((val_loss, optimizer.param_groups[0]["lr"], float(self.all_reduce(loss.item()))))
            self.print(f"epoch {epoch}: {steps} steps, validation {val_loss:.4f}")
            if val_loss < best and self.is_global_zero:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
            best = min(best, val_loss)
        return history, model.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "best.pt"
        batch = BATCH
        args = Namespace(seed=0, batch_size=batch, hidden=8, lr=0.02, epochs=4, clip=1.0, checkpoint=path)
        history, weights = Main().train(args)
        RESULT = {"history": history, "model": weights, "best": torch.load(path)["model"]}
