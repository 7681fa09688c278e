"""Small data sets for the scripts, the same at every call."""

import torch
from torch.utils.data import TensorDataset

WHOLE_BATCH = BATCH = 16  # of a plain run; the test sets that of a process


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
