"""The systems: ways to make a plain loop faster. Each runs the same loop, `steps`."""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import trainers
from benchmarks.experts import (
    by_hand,
    compiled,
    compiled_step,
    expert,
    expert_compile,
    expert_fp32,
    expert_fp32_1_thread,
    expert_fp32_compile,
    expert_jemalloc,
    has_fast_bf16,
    jemalloc_settings,
    under_autocast,
    why_not_jemalloc,
)
from benchmarks.jitted import jax
from benchmarks.loop import parts_of_steps, steps
from benchmarks.workloads import Workload
from benchmarks.workloads.workload import grown


def plain(work: Workload, count: int) -> list[float]:
    """fp32, eager: the plain loop."""
    return steps(work.model, work.optimizer, work.batches, work.loss, count)


def autocast(work: Workload, count: int) -> list[float]:
    """Manual bf16 autocast."""
    return steps(work.model, work.optimizer, work.batches, under_autocast(work.loss), count)


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
    """`torch.compile` with manual bf16 autocast.

    Raises
    ------
    RuntimeError
        Nothing was compiled, and the loop ran as under `autocast`.
    """
    return compiled(
        lambda model: steps(model, work.optimizer, work.batches, under_autocast(work.loss), count), work.model
    )


def ipex(work: Workload, count: int) -> list[float]:
    """Intel Extension for PyTorch with manual bf16 autocast."""
    import intel_extension_for_pytorch

    model, optimizer = intel_extension_for_pytorch.optimize(work.model, optimizer=work.optimizer, dtype=torch.bfloat16)
    return steps(model, optimizer, work.batches, under_autocast(work.loss), count)


def nano(work: Workload, count: int) -> list[float]:
    """nano_loop with channels_last for images, and in bf16 if the CPU has the instructions."""
    return nano_with(work, count, **_reduced(), channels_last=work.images)


def nano_products(work: Workload, count: int) -> list[float]:
    """nano_loop as in `nano`, with ``precision="bf16-products"``, which is the same as ``"auto"``."""
    return nano_with(work, count, precision="bf16-products", channels_last=work.images)


def nano_compile(work: Workload, count: int) -> list[float]:
    """nano_loop as in `nano`, with ``compile=True``."""
    return nano_with(work, count, **_reduced(), channels_last=work.images, compile=True)


def nano_fp32(work: Workload, count: int) -> list[float]:
    """nano_loop with its defaults, in fp32."""
    return nano_with(work, count)


def nano_fp32_1_thread(work: Workload, count: int) -> list[float]:
    """`nano_fp32` with one thread."""
    return nano_with(work, count, num_threads=1)


def nano_auto(work: Workload, count: int) -> list[float]:
    """nano_loop with ``precision="auto"`` and no other option."""
    return nano_with(work, count, precision="auto")


def nano_auto_1_thread(work: Workload, count: int) -> list[float]:
    """`nano_auto` with one thread."""
    return nano_with(work, count, precision="auto", num_threads=1)


def nano_ipex(work: Workload, count: int) -> list[float]:
    """nano_loop as in `nano`, with ``use_ipex=True``."""
    return nano_with(work, count, precision="bf16", channels_last=work.images, use_ipex=True)


def nano_without(lever: str, work: Workload, count: int) -> tuple[list[float], tuple[str, ...]]:
    """nano_loop as in `nano`, without one of the `LEVERS` or with all; returns the seconds and the applied steps."""
    options = {"channels_last": work.images, **LEVERS[lever]}
    train = _train(**_reduced(), **options)
    seconds = train(work.model, work.optimizer, work.batches, work.loss, count)
    return seconds, train.report.applied


def nano_ranks(work: Workload, count: int, cpus: Sequence[int]) -> list[float]:
    """nano_loop as in `nano`, in one process for each of these CPUs; each trains on whole batches."""
    options: dict[str, Any] = {"num_processes": len(cpus), "cpu_for_each_process": [[cpu] for cpu in cpus]}
    return nano_with(work, count, **_reduced(), channels_last=work.images, **options)


def nano_split(work: Workload, count: int, processes: int, samples: int) -> list[float]:
    """nano_loop as in `nano`, with this many processes that share all cores and each batch of this many samples."""
    batch = next(iter(work.batches))
    rows = grown(batch, samples)
    work.batches = DataLoader(rows if isinstance(rows, torch.Tensor) else TensorDataset(*rows), samples)
    options: dict[str, Any] = {"num_processes": processes, "split_batches": True} if processes > 1 else {}
    return nano_with(work, count, **_reduced(), channels_last=work.images, **options)


def nano_on_one_core(work: Workload, count: int, samples: int) -> list[tuple[float, float]]:
    """nano_loop as in `nano`, on one core and batches of this many samples; returns `parts_of_steps`."""
    import nano_loop

    batch = next(iter(work.batches))
    options = {**_reduced(), "channels_last": work.images, "num_threads": 1, "verbose": False}
    train = nano_loop.nano(**options)(parts_of_steps)
    return train(work.model, work.optimizer, grown(batch, samples), work.loss, count)


def _reduced() -> dict[str, Any]:
    return {"precision": "bf16"} if has_fast_bf16() else {}


def nano_with(work: Workload, count: int, **options: Any) -> list[float]:
    """nano_loop with these options."""
    seconds: list[float] = _train(**options)(work.model, work.optimizer, work.batches, work.loss, count)
    return seconds


def _train(**options: Any) -> Any:
    import nano_loop

    return nano_loop.nano(**{"verbose": False, **options})(steps)


#: By name, in the order of the tables. Each accepts a workload and a number of steps, and returns their seconds.
SYSTEMS: dict[str, Callable[[Workload, int], list[float]]] = {
    each.__name__: each
    for each in (
        *(plain, autocast, by_hand, expert, expert_jemalloc, expert_compile),
        *(fabric, accelerate, compile, ipex, nano, nano_products, nano_compile, nano_fp32, nano_ipex),
    )
} | trainers.SYSTEMS
#: The default systems.
DEFAULT = tuple(name for name in SYSTEMS if name not in trainers.SYSTEMS)
#: The systems of the users' suite, which only make sense for small models.
OF_USERS: dict[str, Callable[[Workload, int], list[float]]] = {
    each.__name__: each
    for each in (
        *(plain, expert_fp32, expert_fp32_1_thread, expert_fp32_compile, compiled_step, jax),
        *(nano_fp32, nano_fp32_1_thread, nano_auto, nano_auto_1_thread),
    )
}
SYSTEMS |= OF_USERS
ALL = ""
#: The options that omit each step of nano_loop; under `ALL` none, which omit nothing.
LEVERS: dict[str, dict[str, bool]] = {
    ALL: {},
    **{
        name: {name: False}
        for name in (
            *("channels_last", "fused_optimizer", "allocator"),
            *("fast_dropout", "fast_attention", "fast_activation", "fast_convolution"),
            *("fast_linear", "fast_rnn", "fast_cross_entropy", "fast_norm", "fast_embedding"),
            *("tune_operators", "fast_fetch"),
        )
    },
}
#: The systems with nano_loop; all others are its peers.
OURS = (
    *("nano", "nano_products", "nano_compile", "nano_fp32", "nano_ipex", *trainers.OURS),
    *("nano_fp32_1_thread", "nano_auto", "nano_auto_1_thread"),
)
#: Not peers: they are not torch loops, and show what is possible.
LIMITS = ("jax",)
#: IPEX works only with torch 2.8.0.
_WITH_IPEX = ("ipex", "nano_ipex")
#: The systems that --quick omits unless they are named, and the reasons.
NOT_QUICK = {
    **dict.fromkeys(
        ("compile", "expert_compile", "expert_fp32_compile", "compiled_step", "nano_compile"),
        "not in --quick, but by name: it compiles for up to a minute",
    ),
    "expert_jemalloc": "not in --quick, but by name: another allocator",
    **dict.fromkeys((*_WITH_IPEX, *LIMITS), "not in --quick, but by name: another Python"),
}
#: The same for many small workloads, each of which would compile again in every round.
_COMPILED_ONCE = ("expert_fp32_compile", "compiled_step")
#: By system, the folder of its Python, if that is not this one, and how to create it.
_ENVIRONMENTS = {
    **dict.fromkeys(_WITH_IPEX, (".venv-ipex", "see benchmarks/README.md")),
    "jax": (".venv-jax", "make ready-jax"),
}


def python_of(system: str) -> str:
    """Return the Python that runs a system."""
    if system not in _ENVIRONMENTS:
        return sys.executable
    return str(Path(__file__).resolve().parent.parent / _ENVIRONMENTS[system][0] / "bin/python")


def settings_of(system: str) -> Mapping[str, str]:
    """Return the environment variables with which a system's process must start."""
    if system in _COMPILED_ONCE:
        return {"TORCHINDUCTOR_CACHE_DIR": _folder_of_graphs()}
    return jemalloc_settings() if system == "expert_jemalloc" else {}


@functools.cache
def _folder_of_graphs() -> str:
    """Return a folder that lasts as long as this process: later rounds load the first round's compiled code."""
    folder = tempfile.mkdtemp(prefix="nano_loop-graphs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def why_not(system: str) -> str | None:
    """Return why a system cannot be measured here, or None."""
    if system == "expert_jemalloc":
        return why_not_jemalloc()
    if Path(python_of(system)).exists():
        return None
    folder, advice = _ENVIRONMENTS[system]
    return f"there is no {folder} ({advice})"
