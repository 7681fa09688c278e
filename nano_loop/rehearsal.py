"""A run of a tiny model, by which a process that waits to be a worker comes to own the memory that a run writes to.

A forked process shares its memory with its parent, and copies each page when it first writes there. A run writes to
thousands of pages, which takes longer than the run of a small model. What waits has the time for it.

`nano_loop.distributed.launch.local.fork_server` imports this module by its name: it may not import what is above it.
"""

from __future__ import annotations

import functools
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop.context_manager import running
from nano_loop.cpu import read_machine
from nano_loop.distributed.launch.alone import Alone
from nano_loop.options import Options
from nano_loop.settings import Settings

_OF_OPTIMIZERS = "torch._dynamo"  # which they import, and which takes a second
# The first would stay in force after the run, and the second waits for a compiler.
_OPTIONS: dict[str, Any] = {"allocator": False, "fast_dropout": False, "verbose": False}


@functools.cache
def script() -> bytes | None:
    """Return the pickled parts of the run; None where its optimizer would import what no run has needed so far."""
    if _OF_OPTIMIZERS not in sys.modules:
        return None
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.rand(2, 2), torch.rand(2, 1)), 2, shuffle=True)
        pickled: bytes = cloudpickle.dumps((_loop, model, optimizer, loader))
        return pickled


def rehearse() -> Iterator[None]:
    """Do the run, in pieces of some milliseconds each."""
    played = script()
    if played is None:
        return
    loop, model, optimizer, loader = pickle.loads(played)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not by the environment, which may ask for several processes, for a search or for a file. It is the caller's.
        settings = Settings(Options.from_call(_OPTIONS, environ={}), read_machine())
        with running(settings, Alone(settings.options), model, optimizer, loader):
            yield
            loop(model, optimizer, loader)
            yield


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
