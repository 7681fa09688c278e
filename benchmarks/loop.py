"""The loop that every system runs: a plain training loop, with the time of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

#: Computes a loss and its backward pass.
Backward = Callable[[torch.Tensor], None]
Loss = Callable[[Any, Any], torch.Tensor]


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch; `itertools.cycle` would load only the first and keep it."""
    while True:
        yield from batches


def steps(
    model: Any,
    optimizer: Any,
    batches: Iterable[Any],
    loss: Loss,
    count: int,
    backward: Backward = torch.Tensor.backward,
) -> list[float]:
    """Run `count` training steps, and return the seconds of each, including the loading of its batch."""

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        backward(loss(model, batch))
        optimizer.step()

    return timed(step, batches, count)


def timed(step: Callable[[Any], object], batches: Iterable[Any], count: int) -> list[float]:
    """Take `count` steps, and return the seconds of each, including the loading of its batch."""
    seconds, last = [], time.perf_counter()
    for batch in islice(endless(batches), count):
        step(batch)
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds


def parts_of_steps(model: Any, optimizer: Any, batch: Any, loss: Loss, count: int) -> list[tuple[float, float]]:
    """Take `count` steps, and return for each the CPU seconds of forward and backward, and those of the optimizer."""
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        began = time.process_time()
        loss(model, batch).backward()
        between = time.process_time()
        optimizer.step()
        found.append((between - began, time.process_time() - between))
    return found
