"""The parts of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Accepts the model and a batch, calls the model as the loop would, and returns the loss.
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Workload:
    """The objects that training steps need.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    optimizer : torch.optim.Optimizer
        Its optimizer.
    batches : iterable
        One batch in a list, or a `DataLoader`, whose loading is then part of the time.
    loss : callable
        Accepts the model and a batch, calls the model as the loop would, and returns the loss.
    images : bool
        Whether the model has convolutions, so that channels_last is useful.
    steps : int
        The number of measured steps of a case, rounded up to whole epochs.
    uncounted_flops : float
        Matrix FLOPs of a step in operators that `torch.utils.flop_counter` does not know.
    jax : str
        The name of its loss in `benchmarks.jitted`, or "" if there is none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Loss
    images: bool = False
    steps: int = 6
    uncounted_flops: float = 0.0
    jax: str = ""


def grown(batch: Any, samples: int) -> Any:
    """Return a batch of this many samples, by repeating those of another batch."""
    if isinstance(batch, Tensor):
        return batch[torch.arange(samples) % len(batch)]
    return type(batch)(grown(each, samples) for each in batch)
