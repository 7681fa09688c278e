"""A workload and systems of a person's own, small enough that a case is its process's start and no more."""

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
HUNGER_MB = 200


def linear(small, uncounted_flops=0.0):
    """One linear layer; it has twice as many rows at full size."""
    rows = BATCH if small else 2 * BATCH
    model = nn.Linear(INPUTS, OUTPUTS)
    batch = torch.randn(rows, INPUTS, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(
        model, optimizer, [batch], lambda model, x: model(x).sum(), steps=3, uncounted_flops=uncounted_flops
    )


def without_a_model(small):
    raise LookupError("no such model\nand more that nobody needs to know")


def of_two_batches(small):
    """An epoch is two batches; it counts three steps, or with the last epoch's rest four."""
    work = linear(small)
    work.batches = [*work.batches, *work.batches]
    return work


def noting_threads(small):
    """Each step notes the number of processes and of their threads in the file that TINY_NOTES names."""
    work = linear(small)
    plain_loss = work.loss

    def loss(model, batch):
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        with open(os.environ["TINY_NOTES"], "a") as notes:
            notes.write(f"{processes} {torch.get_num_threads()}\n")
        return plain_loss(model, batch)

    work.loss = loss
    return work


def convolution(small):
    """A convolution of images, given with their labels."""
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


def counting(work, count):
    """Take as many seconds for each step as there were steps before it."""
    return [float(number) for number in range(count)]


def chatty(work, count):
    """Print what could be taken for a result."""
    print('{"median_ms": 0}')
    return plain(work, count)


def drifting(work, count):
    """Train with a learning rate that is off by a ten-thousandth."""
    for group in work.optimizer.param_groups:
        group["lr"] *= 1.0001
    return plain(work, count)


def hungry(work, count):
    """Have so many MB for a moment."""
    bytearray(b"1") * (HUNGER_MB * 2**20)
    return plain(work, count)


def littering(work, count):
    """Leave a file, and say in the error where."""
    raise FileExistsError(tempfile.mkdtemp())


def failing(work, count):
    raise RuntimeError("this system is broken")


def dying(work, count):
    os.kill(os.getpid(), signal.SIGSEGV)


def endless(work, count):
    while True:
        signal.pause()


def with_setting(work, count):
    """Train as `plain` does, in a process that was started with a variable."""
    assert os.environ["SET_FOR_IT"] == "1"
    return plain(work, count)


def sleeping(work, count):
    """Take 50 ms more for a step than `plain`."""
    loss = work.loss

    def slow(model, batch):
        time.sleep(0.05)
        return loss(model, batch)

    work.loss = slow
    return plain(work, count)
