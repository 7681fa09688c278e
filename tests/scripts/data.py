"""Small data sets and networks for the scripts, the same at every call."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

WHOLE_BATCH = BATCH = 16  # of a plain run; the test sets that of a process


def images(count=64, classes=4, size=8):
    """Return images whose class is the bright quarter."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (count,), generator=generator)
    pixels = torch.rand(count, 1, size, size, generator=generator) * 0.5
    half = size // 2
    for image, label in zip(pixels, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.5
    return TensorDataset(pixels, labels)


def rows(count=96, width=6):
    """Return rows of a table, and a value that depends on them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, width, generator=generator)
    return TensorDataset(x, (x * torch.arange(width)).sum(1, keepdim=True) / width)


def waves(count=24, length=20):
    """Return sine waves with different phases."""
    phases = torch.arange(count)[:, None] * 0.3
    return torch.sin(torch.arange(length)[None] * 0.5 + phases)


def text(length=400, symbols=12):
    """Return symbols, most of which follow from the one before."""
    generator = torch.Generator().manual_seed(0)
    jumps = torch.randint(0, 2, (length,), generator=generator)
    return (torch.arange(length) + jumps.cumsum(0)) % symbols


def small_cnn(classes=4):
    """Return a convolution with a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, classes)
    )
