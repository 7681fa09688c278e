"""The workloads: a model, its optimizer, its batches and its loss, each as a user would write them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.workloads.images import resnet18_folder, resnet50, unet, vit
from benchmarks.workloads.sequences import bert, gpt2, lstm
from benchmarks.workloads.tables import mlp
from benchmarks.workloads.workload import Workload

#: By name. Each takes whether it is to be small, for a quick look.
WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "resnet50": resnet50,
    "vit": vit,
    "bert": bert,
    "gpt2": gpt2,
    "lstm": lstm,
    "unet": unet,
    "mlp": mlp,
    "resnet18_folder": resnet18_folder,
}

__all__ = ["WORKLOADS", "Workload"]
