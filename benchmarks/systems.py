"""The systems: what a user may put around a plain loop to make it faster. Each runs the same loop, `steps`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.workloads import Workload

#: A loss and how to go backward from it.
Backward = Callable[[torch.Tensor], None]
Loss = Callable[[Any, Any], torch.Tensor]


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch; `itertools.cycle` would load the first alone and keep it."""
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
    """Run `count` training steps, and return the seconds that each took, with the loading of its batch."""
    seconds, last = [], time.perf_counter()
    for batch in islice(endless(batches), count):
        optimizer.zero_grad()
        backward(loss(model, batch))
        optimizer.step()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds


def plain(work: Workload, count: int) -> list[float]:
    """fp32, eager, as the user wrote it."""
    return steps(work.model, work.optimizer, work.batches, work.loss, count)


def _under_autocast(loss: Loss) -> Loss:
    """Autocast around the forward and the loss, as torch's own recipe has it."""

    def autocast_loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return autocast_loss


def autocast(work: Workload, count: int) -> list[float]:
    """bf16 autocast by hand."""
    return steps(work.model, work.optimizer, work.batches, _under_autocast(work.loss), count)


def fabric(work: Workload, count: int) -> list[float]:
    """Lightning Fabric's ``bf16-mixed``."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer = fabric.setup(work.model, work.optimizer)
    batches = fabric.setup_dataloaders(work.batches) if isinstance(work.batches, DataLoader) else work.batches
    return steps(model, optimizer, batches, work.loss, count, fabric.backward)


def accelerate(work: Workload, count: int) -> list[float]:
    """Hugging Face Accelerate's ``bf16`` on the CPU."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer = accelerator.prepare(work.model, work.optimizer)
    batches = accelerator.prepare(work.batches) if isinstance(work.batches, DataLoader) else work.batches
    return steps(model, optimizer, batches, work.loss, count, accelerator.backward)


def compile(work: Workload, count: int) -> list[float]:
    """`torch.compile`, and bf16 autocast by hand."""
    return steps(torch.compile(work.model), work.optimizer, work.batches, _under_autocast(work.loss), count)


def ipex(work: Workload, count: int) -> list[float]:
    """Intel Extension for PyTorch, and bf16 autocast by hand."""
    import intel_extension_for_pytorch

    model, optimizer = intel_extension_for_pytorch.optimize(work.model, optimizer=work.optimizer, dtype=torch.bfloat16)
    return steps(model, optimizer, work.batches, _under_autocast(work.loss), count)


def nano(work: Workload, count: int) -> list[float]:
    """nano_loop in bf16, and with channels_last where there are images."""
    return _nano(work, count, precision="bf16", channels_last=work.images)


def nano_fp32(work: Workload, count: int) -> list[float]:
    """nano_loop's defaults, in fp32."""
    return _nano(work, count)


def nano_ipex(work: Workload, count: int) -> list[float]:
    """nano_loop as in `nano`, with ``use_ipex=True``."""
    return _nano(work, count, precision="bf16", channels_last=work.images, use_ipex=True)


def nano_ranks(work: Workload, count: int, cpus: Sequence[int]) -> list[float]:
    """nano_loop as in `nano`, in one process for each of these CPUs; each trains on whole batches."""
    options: dict[str, Any] = {"num_processes": len(cpus), "cpu_for_each_process": [[cpu] for cpu in cpus]}
    return _nano(work, count, precision="bf16", channels_last=work.images, **options)


def _nano(work: Workload, count: int, **options: Any) -> list[float]:
    import nano_loop

    train = nano_loop.nano(**options, verbose=False)(steps)
    return train(work.model, work.optimizer, work.batches, work.loss, count)


#: By name, in the order of the tables. Each takes a workload and a number of steps, and returns their seconds.
SYSTEMS: dict[str, Callable[[Workload, int], list[float]]] = {
    each.__name__: each for each in (plain, autocast, fabric, accelerate, compile, ipex, nano, nano_fp32, nano_ipex)
}
#: nano_loop's own; all others are its peers.
OURS = ("nano", "nano_fp32", "nano_ipex")
#: IPEX works with torch 2.8.0 alone.
_WITH_IPEX = ("ipex", "nano_ipex")
NOT_QUICK = {
    "compile": "not in --quick: it compiles for up to a minute",
    **dict.fromkeys(_WITH_IPEX, "not in --quick: another Python"),
}
_IPEX_PYTHON = Path(__file__).resolve().parent.parent / ".venv-ipex/bin/python"


def python_of(system: str) -> str:
    """Return the Python that runs a system."""
    return str(_IPEX_PYTHON) if system in _WITH_IPEX else sys.executable


def why_not(system: str, quick: bool) -> str | None:
    """Return why a system cannot be measured, or None."""
    if quick and system in NOT_QUICK:
        return NOT_QUICK[system]
    if not Path(python_of(system)).exists():
        return "there is no .venv-ipex (see benchmarks/README.md)"
    return None
