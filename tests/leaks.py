"""State of a process that a run might leave changed: settings, environment, replaced attributes, affinity masks."""

import os
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

from nano_loop.patching.patch_table import left_by_runs

# pytest sets the first for each phase of a test; torch sets the others when it first compiles something.
NOT_OURS = frozenset(("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"))

# Attributes that a run replaces temporarily. One that a class only inherits must be inherited again afterwards.
REPLACED = (
    (nn.Module, "__call__"),
    (nn.Module, "forward"),
    (torch.Tensor, "view"),
    (torch.Tensor, "bernoulli_"),
    (DataLoader, "__iter__"),
    (DataLoader, "__init__"),
    (DataLoader, "__len__"),
    (DataLoader, "dataset"),
    (torch, "group_norm"),
    (torch.optim.Optimizer, "__init__"),
    (torch.optim.Optimizer, "step"),
    (torch.optim.Optimizer, "state_dict"),
)


def process_state():
    return {
        "thread count": torch.get_num_threads(),
        "autocast enabled": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad enabled": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "torch.compile": torch.compile,
        "rank in Lightning's eyes": getattr(rank_zero_only, "rank", 0),
        **{f"table of {name}": count for name, count in left_by_runs().items()},
        **{f"{owner.__name__}.{name}": vars(owner).get(name, "inherited") for owner, name in REPLACED},
        **{f"environment {name}": value for name, value in os.environ.items() if name not in NOT_OURS},
    }


def changes(before, after):
    for name in sorted({*before, *after}):
        old, new = before.get(name, "absent"), after.get(name, "absent")
        if old != new:
            yield f"{name}: {old!r} before, {new!r} after"


def affinity_masks():
    """The CPUs that each thread of this process may run on, by thread id; empty if the system has no masks."""
    masks = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            masks[int(task.name)] = frozenset(os.sched_getaffinity(int(task.name)))
        except ProcessLookupError:
            continue
    return masks


def moved_threads(before, after):
    """Threads whose mask has changed, and new threads with a mask that no thread had before."""
    known = set(before.values())
    for thread, mask in after.items():
        old = before.get(thread)
        if old is None and mask not in known:
            yield f"affinity of the new thread {thread}: {sorted(mask)}, as no thread had before"
        elif old not in (None, mask):
            yield f"affinity of thread {thread}: {sorted(old)} before, {sorted(mask)} after"
