"""Classify scikit-learn's handwritten digits with a small ResNet: `@nano` on an existing training loop.

    python examples/digits.py                        # accelerated
    python examples/digits.py --plain                # the same loop without nano_loop
    python examples/digits.py --precision 32         # accelerated, in fp32
    python examples/digits.py --num-processes 2      # two processes, each on half of the cores
    python examples/digits.py --epochs 2 --seed 7

It needs `pip install ".[examples]"` in the checkout. The data comes with scikit-learn, so nothing is downloaded.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

parser = argparse.ArgumentParser(description="Train a small ResNet on scikit-learn's handwritten digits.")
parser.add_argument("--plain", action="store_true", help="run the same loop without nano_loop")
parser.add_argument("--precision", default="auto", help="32, bf16 or auto (default: auto)")
parser.add_argument("--num-processes", type=int, metavar="N", help="data-parallel processes (default: 1)")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64, help="images per step, of all processes (default: 64)")
parser.add_argument("--width", type=int, default=128, help="channels of the first stage (default: 128)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
args = parser.parse_args()

image_size = 32  # the digits are 8×8: they are upscaled, so that convolutions make sense
precision = 32 if args.precision == "32" else args.precision
max_lr, weight_decay = 2e-3, 0.01

processes = args.num_processes or 1
if args.batch_size % processes:
    parser.error(f"--batch-size {args.batch_size} does not divide into {processes} processes")

if args.plain:

    def nano(*arguments, **options):
        """Replace the decorator for `--plain`: return the function unchanged."""
        return lambda function: function
else:
    from nano_loop import nano


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut connection."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same_shape = inputs == outputs and stride == 1
        self.around = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Sequential):
    """A stem, two stages of one block, and a linear classifier: map (N, 1, H, W) images to (N, 10) logits."""

    def __init__(self, width):
        super().__init__(
            nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width, width, stride=1),
            Block(width, 2 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


def digits():
    """Return the digits as a training and a test dataset of (1, 32, 32) images with values from -1 to 1."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, size=image_size, mode="bilinear")
    labels = torch.tensor(labels)
    train_rows, test_rows = train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    return [TensorDataset(images[rows], labels[rows]) for rows in (train_rows, test_rows)]


@torch.no_grad()
def accuracy(model, loader):
    """Return the share of images that the model labels correctly."""
    model.eval()
    correct = sum((model(images).argmax(dim=1) == labels).sum().item() for images, labels in loader)
    model.train()
    return correct / len(loader.dataset)


# All processes together use the same batches as one, so the learning rate stays unchanged: auto_lr=False.
@nano(args.num_processes, precision=precision, channels_last=True, auto_lr=False)
def train(model, optimizer, scheduler, train_loader, test_loader, epochs):
    """Train for some epochs and return the accuracy on the test set after the last one."""
    test_accuracy = 0.0
    for epoch in range(epochs):
        bar = tqdm(train_loader, desc=f"epoch {epoch + 1}/{epochs}", unit="batch")
        for images, labels in bar:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
        test_accuracy = accuracy(model, test_loader)
        print(f"epoch {epoch + 1}: test accuracy {test_accuracy:.2%}", flush=True)
    return test_accuracy


torch.manual_seed(args.seed)
train_set, test_set = digits()
train_loader = DataLoader(train_set, args.batch_size // processes, shuffle=True)
test_loader = DataLoader(test_set, args.batch_size)

model = ResNet(args.width)
optimizer = torch.optim.AdamW(model.parameters(), max_lr, weight_decay=weight_decay)
steps = args.epochs * math.ceil(len(train_loader) / processes)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=steps)

print(f"training on {len(train_set):,} images", flush=True)
start = time.perf_counter()
test_accuracy = train(model, optimizer, scheduler, train_loader, test_loader, args.epochs)
seconds = time.perf_counter() - start

print(f"test accuracy {test_accuracy:.2%} after {seconds:.1f} s of training")
if args.json:
    args.json.write_text(json.dumps({"seconds": seconds, "accuracy": test_accuracy}))
