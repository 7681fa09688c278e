"""Classify scikit-learn's handwritten digits with a LightningModule, with one changed import.

    python examples/lightning_digits.py                        # accelerated
    python examples/lightning_digits.py --plain                # the same with Lightning's Trainer
    python examples/lightning_digits.py --num-processes 2      # two processes, each on half of the cores

It needs `pip install ".[examples,lightning]"` in the checkout. The data comes with scikit-learn, so nothing is
downloaded.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's handwritten digits.")
parser.add_argument("--plain", action="store_true", help="use Lightning's own Trainer")
parser.add_argument("--precision", default="auto", help="32, bf16 or auto (default: auto)")
parser.add_argument("--num-processes", type=int, metavar="N", help="data-parallel processes (default: 1)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="images per step, of all processes (default: 64)")
parser.add_argument("--width", type=int, default=64, help="channels of the convolutions (default: 64)")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

if args.plain:
    from lightning.pytorch import Trainer

    options = {"accelerator": "cpu", "devices": 1}
else:
    from nano_loop.lightning import Trainer

    precision = 32 if args.precision == "32" else args.precision
    options = {"num_processes": args.num_processes, "precision": precision, "channels_last": True}


class Digits(LightningModule):
    """Two convolutions and a classifier: map (N, 1, 16, 16) images to (N, 10) logits."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * width, 10),
        )

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        right = (self(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)]


def datasets():
    """Return the training and the test dataset."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    small = [torch.tensor(each, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for each in parts[:2]]
    train, test = (F.interpolate(each, 16, mode="bilinear") for each in small)
    return TensorDataset(train, torch.tensor(parts[2])), TensorDataset(test, torch.tensor(parts[3]))


if __name__ == "__main__":
    seed_everything(args.seed)
    train, test = datasets()
    loader = DataLoader(train, args.batch_size // (args.num_processes or 1), shuffle=True)
    module = Digits(args.width)
    trainer = Trainer(max_epochs=args.epochs, logger=False, enable_checkpointing=False, **options)
    start = time.perf_counter()
    trainer.fit(module, loader)
    seconds = time.perf_counter() - start
    (result,) = trainer.validate(module, DataLoader(test, 256), verbose=False)
    print(f"test accuracy {result['accuracy']:.1%}, {seconds:.1f} s")
