"""A trainer with model, optimizer and loaders as attributes, a schedule, a history and the best weights."""

import logging
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split

import nano_loop
from nano_loop import nano
from scripts.data import BATCH, images, small_cnn

logger = logging.getLogger("trainer")


class Trainer:
    def __init__(self, model, train_set, val_set, folder, epochs=3, lr=0.01):
        self.model, self.epochs, self.folder = model, epochs, folder
        self.loader = DataLoader(train_set, BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))
        self.val_loader = DataLoader(val_set, 8)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=epochs)
        self.history, self.best = [], float("inf")

    @nano
    def train(self):
        for epoch in range(self.epochs):
            loss = self._train_epoch()
            val_loss, accuracy = self.evaluate()
            self.scheduler.step()
            self.history.append({"loss": loss, "val_loss": val_loss, "lr": self.scheduler.get_last_lr()[0]})
            logger.info("epoch %d: %.4f, %.4f, %.0f%%", epoch, loss, val_loss, 100 * accuracy)
            if val_loss < self.best:
                self.best = val_loss
                if nano_loop.is_global_zero():
                    torch.save({"epoch": epoch, "model": self.model.state_dict()}, self.folder / "best.pt")

    def _train_epoch(self):
        self.model.train()
        total, batches = 0.0, 0
        for inputs, targets in self.loader:
            loss = self.criterion(self.model(inputs), targets)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            total, batches = total + loss.item(), batches + 1
        return float(nano_loop.all_reduce(total / batches))

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        outputs = [(self.model(inputs), targets) for inputs, targets in self.val_loader]
        logits, targets = (torch.cat(each) for each in zip(*outputs, strict=True))
        return self.criterion(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item()


torch.manual_seed(0)
train_set, val_set = random_split(images(96), [64, 32])
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(small_cnn(), train_set, val_set, Path(folder))
    trainer.train()
    RESULT = {"history": trainer.history, "best": torch.load(Path(folder) / "best.pt"), "test": trainer.evaluate()}
RESULT["model"] = trainer.model.state_dict()
