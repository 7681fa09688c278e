"""The small models, data and loops that the tests of several ranks run."""

import os

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def cores():
    """Lists of CPUs that swap the first two cores, for the second of pytest's workers; None for the other.

    A rank is on its core from its start, and imports torch there for seconds. Of two runs at once, both second ranks
    would share the second core, and the first would idle.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    swaps = os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and len(cpus) > 1
    return [[cpus[1]], [cpus[0]]] if swaps else None


OPTIONS = {"num_processes": 2, "auto_lr": False, "verbose": False, "timeout": 60, "cpu_for_each_process": cores()}


def parts(samples=32, batch_size=4):
    """A linear model, its optimizer and a loader, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 3, generator=generator)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)


def fit(model, optimizer, loader, each_step=lambda rank, step: None, epochs=2):
    """Train, calling ``each_step(rank, step)`` before each step; gives the number of steps."""
    step = 0
    for _ in range(epochs):
        for x, y in loader:
            each_step(rank(), step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
    return step


def rank():
    return distributed.get_rank() if distributed.is_initialized() else 0


def everywhere(value):
    """The values of both ranks, on each."""
    gathered = [None, None]
    distributed.all_gather_object(gathered, value)
    return gathered


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def mask():
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
