"""What a workload is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Takes the model and a batch, calls the model as the loop would, and returns the loss.
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Workload:
    """What training steps need.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    optimizer : torch.optim.Optimizer
        Its optimizer.
    batches : iterable
        One batch in a list, or a `DataLoader`, whose loading is then part of the time.
    loss : callable
        Takes the model and a batch, calls the model as the loop would, and returns the loss.
    images : bool
        Whether the model has convolutions, so that channels_last is worth asking for.
    steps : int
        How many steps a case counts, or with the last epoch's rest more.
    uncounted_flops : float
        Matrix FLOPs of a step in operators that `torch.utils.flop_counter` does not know.
    jax : str
        The name of its loss in `benchmarks.jitted`, or "" where it has none there.
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
    """Return a batch of so many samples, those of another again and again."""
    if isinstance(batch, Tensor):
        return batch[torch.arange(samples) % len(batch)]
    return type(batch)(grown(each, samples) for each in batch)
