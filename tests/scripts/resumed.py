"""A run that saves a checkpoint after each epoch, and a second one that resumes from the one before the last."""

import os
import random
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop import nano
from scripts.data import BATCH, images, small_cnn


@nano
def train(model, optimizer, scheduler, loader, folder, start_epoch, epochs):
    for epoch in range(start_epoch, epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        state = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        temporary = Path(folder, "checkpoint.tmp")
        with open(temporary, "wb") as file:
            torch.save(state, file)
        os.replace(temporary, Path(folder, f"checkpoint-{epoch + 1}.pt"))


def build():
    random.seed(0)
    torch.manual_seed(0)
    model = small_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


with tempfile.TemporaryDirectory() as folder:
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, DataLoader(images(), BATCH), folder, 0, 3)
    again, optimizer, scheduler = build()
    checkpoint = torch.load(Path(folder, "checkpoint-2.pt"))
    again.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    train(again, optimizer, scheduler, DataLoader(images(), BATCH), folder, checkpoint["epoch"], 3)
    files = sorted(path.name for path in Path(folder).iterdir())
RESULT = {"model": model.state_dict(), "resumed": again.state_dict(), "files": len(files)}
