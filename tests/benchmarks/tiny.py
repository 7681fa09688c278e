"""A user-defined workload and systems, so small that a case takes no longer than the start of its process."""

import os
import signal
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.systems import plain
from benchmarks.workloads import Workload

BATCH, INPUTS, OUTPUTS = 8, 16, 4


def linear(small, uncounted_flops=0.0):
    """One linear layer; it has twice as many rows at full size."""
    rows = BATCH if small else 2 * BATCH
    model = nn.Linear(INPUTS, OUTPUTS)
    batch = torch.randn(rows, INPUTS, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(
        model, optimizer, [batch], lambda model, x: model(x).sum(), steps=3, uncounted_flops=uncounted_flops
    )


def convolution(small):
    """A convolution of labelled images."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    batch = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(
        model, optimizer, [batch], lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), images=True, steps=3
    )


def no_module(small):
    """Parameters without a forward that torch.compile could trace."""
    work = linear(small)
    work.loss = lambda model, x: (x @ model.weight.T + model.bias).sum()
    return work


def chatty(work, count):
    """Print text that could be mistaken for a result."""
    print('{"median_ms": 0}')
    return plain(work, count)


def drifting(work, count):
    """Train with a learning rate that is off by a factor of 1.0001."""
    for group in work.optimizer.param_groups:
        group["lr"] *= 1.0001
    return plain(work, count)


def littering(work, count):
    """Leave a file, and name it in the error."""
    raise FileExistsError(tempfile.mkdtemp())


def failing(work, count):
    raise RuntimeError("this system is broken")


def dying(work, count):
    os.kill(os.getpid(), signal.SIGSEGV)


def endless(work, count):
    while True:
        signal.pause()


def sleeping(work, count):
    """Take 50 ms longer per step than `plain`."""
    loss = work.loss

    def slow(model, batch):
        time.sleep(0.05)
        return loss(model, batch)

    work.loss = slow
    return plain(work, count)
