"""Measure in one process a workload's steps or losses under a system, its FLOPs, or the machine's products.

python -m benchmarks.case '{"task": "steps", "workload": "mlp", "system": "nano", "small": true}'

It prints one line of JSON: the measurement, or the reason why there is none.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch

from benchmarks import systems
from benchmarks.fresh import keep_output
from benchmarks.learning import curve
from benchmarks.limits import copied_in_a_second, matmul_gflops, step_flops
from benchmarks.names import find
from benchmarks.traffic import traffic
from benchmarks.workloads import ALL, Workload
from nano_loop.cpu import peak_memory

SHARE_WARMUP, SHARE_STEPS = 4, 3  # `tune_operators` measures in the first ones

Train = Callable[[Workload, int], list[float]]


def steps(workload: str, system: str, small: bool) -> dict[str, float]:
    """Measure training steps under a system."""
    return _measured(workload, find(system, systems.SYSTEMS), small)


def levers(workload: str, lever: str, small: bool) -> dict[str, Any]:
    """Measure training steps of nano_loop without one of its levers, and name the steps that it applied."""
    applied: list[str] = []

    def train(work: Workload, count: int) -> list[float]:
        seconds, applied[:] = systems.nano_without(lever, work, count)
        return seconds

    return {**_measured(workload, train, small), "applied": applied}


def ranks(workload: str, cpus: Sequence[int], small: bool) -> dict[str, float]:
    """Measure training steps of nano_loop in one process for each of these CPUs."""
    return _measured(workload, lambda work, count: systems.nano_ranks(work, count, cpus), small)


def split(workload: str, processes: int, samples: int, small: bool) -> dict[str, float]:
    """Measure training steps of nano_loop with this many processes that share each batch."""
    return _measured(workload, lambda work, count: systems.nano_split(work, count, processes, samples), small)


def share(workload: str, samples: int, small: bool) -> dict[str, float]:
    """Measure the parts of a step of this many samples on one core, the gradients, and the memory bandwidth."""
    work = build(workload, small)
    found = systems.nano_on_one_core(work, SHARE_WARMUP + SHARE_STEPS, samples)[SHARE_WARMUP:]
    compute, update = (statistics.median(seconds) * 1e3 for seconds in zip(*found, strict=True))
    nbytes = sum(weight.nbytes for weight in work.model.parameters() if weight.requires_grad)
    rate = copied_in_a_second() / 1e9
    return {"compute_ms": compute, "update_ms": update, "gradients_mb": nbytes / 1e6, "rate_gb": rate}


def losses(workload: str, system: str, small: bool, count: int, noise: float = 0.0) -> dict[str, list[float]]:
    """Return the losses of `count` training steps under a system, after some relative noise on the weights."""
    work, seen = build(workload, small), []
    with torch.no_grad():
        for weight in work.model.parameters() if noise else ():
            own = torch.Generator().manual_seed(1)  # dropout must draw the same as without noise
            weight.mul_(1 + noise * torch.randn(weight.shape, generator=own))
    original = work.loss

    def noted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = original(model, batch)
        seen.append(value.detach())
        return value

    work.loss = noted
    find(system, systems.SYSTEMS)(work, count)
    return {"losses": [value.item() for value in seen]}


def flops(workload: str, small: bool) -> dict[str, float]:
    """Count the matrix FLOPs of a step."""
    return {"flops": step_flops(build(workload, small))}


def between(workload: str, small: bool, threads: int | None = None) -> dict[str, Any]:
    """Return time and bytes of the operators between the products of a step of nano_loop (see `traffic`)."""
    if threads:
        torch.set_num_threads(threads)
    return traffic(build(workload, small))


def _measured(workload: str, train: Train, small: bool) -> dict[str, float]:
    work = build(workload, small)
    warmup, counted = _whole_epochs(max(2, work.steps // 10), work), _whole_epochs(work.steps, work)
    seconds = train(work, warmup + counted)
    return {
        "median_ms": statistics.median(_epoch_means(seconds[warmup:], work)) * 1e3,
        "first_step_ms": seconds[0] * 1e3,
        "peak_rss_mb": peak_memory() / 2**20,
    }


def _epoch(work: Workload) -> int:
    return len(work.batches) if isinstance(work.batches, Sized) else 1


def _whole_epochs(count: int, work: Workload) -> int:
    return math.ceil(count / _epoch(work)) * _epoch(work)


def _epoch_means(seconds: Sequence[float], work: Workload) -> list[float]:
    """Return each epoch's time per step: a loader's work once per epoch belongs to no single step."""
    epoch = _epoch(work)
    return [statistics.fmean(seconds[start : start + epoch]) for start in range(0, len(seconds), epoch)]


def build(workload: str, small: bool) -> Workload:
    """Return a workload, which starts with the same weights and batches each time."""
    torch.manual_seed(0)
    work: Workload = find(workload, ALL)(small)
    work.model.train()
    return work


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "steps": steps,
    "losses": losses,
    "ranks": ranks,
    "split": split,
    "share": share,
    "levers": levers,
    "between": between,
    "flops": flops,
    "matmul": matmul_gflops,
    "learning": curve,
}


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job, and return its measurement, or the reason why there is none."""
    arguments = dict(job)
    warnings.simplefilter("ignore")  # the peers' advice about GPUs and loader workers
    try:
        return TASKS[arguments.pop("task")](**arguments)
    except Exception as error:  # if a system fails, the run continues and reports it
        return {"reason": reason(error)}


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


def main() -> None:
    output = keep_output()
    print(json.dumps(perform(json.loads(sys.argv[1]))), file=output, flush=True)


if __name__ == "__main__":
    main()
