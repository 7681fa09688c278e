"""A small model with an optimizer, a batch and a loss, and everything of them that a search has to leave as it is."""

import random

import numpy
import torch
from torch import nn

from nano_loop.search.candidates import STEPS_BY_DEFAULT

# Everything but what a test is about stays as it is.
FIXED = {"num_processes": 1, "num_threads": 1, "compile": False, "use_ipex": False}
STEPS = dict.fromkeys(STEPS_BY_DEFAULT, False)


def made(kind=nn.Linear):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), kind(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.rand(4, 8)


def loss_of(model, batch):
    return model(batch).square().mean()


def state_of(model, optimizer):
    """Return the bytes of the weights, the gradients and the optimizer's state, and the states of random generators."""
    states = [part for each in optimizer.state_dict()["state"].values() for part in each.values()]
    gradients = [each.grad for each in model.parameters()]
    tensors = [*model.state_dict().values(), *states, *gradients, torch.get_rng_state()]
    groups = [{**each, "params": len(each["params"])} for each in optimizer.param_groups]
    return (
        [None if each is None else each.numpy().tobytes() for each in tensors],
        str(groups),
        str(numpy.random.get_state()),
        random.getstate(),
        model.training,
    )
