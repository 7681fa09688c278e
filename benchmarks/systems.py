"""The systems: what a user may put around a plain loop to make it faster. Each runs the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch

from benchmarks.workloads import Workload

#: Called before each step's backward with the loss, for systems that want it done their way.
Backward = Callable[[torch.Tensor], None]


def steps(
    work: Workload, count: int, model: Any, optimizer: Any, backward: Backward = torch.Tensor.backward
) -> list[float]:
    """Run `count` training steps, and return the seconds that each took."""
    seconds = []
    for batch in islice(cycle(work.batches), count):
        start = time.perf_counter()
        optimizer.zero_grad()
        backward(work.loss(model, batch))
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def plain(work: Workload, count: int) -> list[float]:
    """fp32, eager, as the user wrote it."""
    return steps(work, count, work.model, work.optimizer)


def autocast(work: Workload, count: int) -> list[float]:
    """bf16 autocast by hand around the forward and the loss."""
    loss = work.loss

    def under_autocast(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    work.loss = under_autocast
    return steps(work, count, work.model, work.optimizer)


def fabric(work: Workload, count: int) -> list[float]:
    """Lightning Fabric's ``bf16-mixed``."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer = fabric.setup(work.model, work.optimizer)
    return steps(work, count, model, optimizer, fabric.backward)


def nano(work: Workload, count: int) -> list[float]:
    """nano_loop in bf16, and with channels_last where there are images."""
    return _nano(work, count, precision="bf16", channels_last=work.images)


def nano_fp32(work: Workload, count: int) -> list[float]:
    """nano_loop's defaults, in fp32."""
    return _nano(work, count)


def _nano(work: Workload, count: int, **options: Any) -> list[float]:
    import nano_loop

    @nano_loop.nano(**options, verbose=False)
    def train(model: Any, optimizer: Any) -> list[float]:
        return steps(work, count, model, optimizer)

    return train(work.model, work.optimizer)


SYSTEMS = {each.__name__: each for each in (plain, autocast, fabric, nano, nano_fp32)}
