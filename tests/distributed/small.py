"""Small models, data and loops for tests of several ranks."""

import os

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def cores():
    """Return CPU lists that swap the first two cores for pytest's second worker, or None for other workers.

    A rank runs on its core from the start, and spends seconds there importing torch. With two concurrent runs, both
    second ranks would share the second core, and the first core would idle.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    swaps = os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and len(cpus) > 1
    return [[cpus[1]], [cpus[0]]] if swaps else None


OPTIONS = {"num_processes": 2, "auto_lr": False, "verbose": False, "timeout": 60, "cpu_for_each_process": cores()}


def parts(samples=32, batch_size=4):
    """Return a linear model, its optimizer and a loader, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 3, generator=generator)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)


def fit(model, optimizer, loader, each_step=lambda rank, step: None, epochs=2):
    """Train, with a call of ``each_step(rank, step)`` before each step, and return the number of steps."""
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
    """Return the values of both ranks, on each rank."""
    gathered = [None, None]
    distributed.all_gather_object(gathered, value)
    return gathered


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def mask():
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
