"""Accelerates a plain PyTorch training loop on CPUs without changes to its body.

The public names are imported when they are first used, so that ``import nano_loop``, and the command line with it, does
not wait for torch. `TorchNano` is a Fabric, whose import takes as long as that of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nano_loop.errors import NanoConfigError, NanoError, NanoWarning, NanoWorkerError
from nano_loop.version import __version__

if TYPE_CHECKING:
    from nano_loop import optim
    from nano_loop.context_manager import accelerated
    from nano_loop.cuda_calls.patching import patch_cuda, unpatch_cuda
    from nano_loop.decorator import nano
    from nano_loop.distributed.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        global_rank,
        is_global_zero,
        local_rank,
        world_size,
    )
    from nano_loop.precision.autocast import disable_casts
    from nano_loop.precision.default_ops import DefaultOps, default_ops
    from nano_loop.report import SetupReport, StepResult
    from nano_loop.torch_nano import TorchNano
    from nano_loop.tuning_call import Tuning, tune
    from nano_loop.verification import Verification, verify
    from nano_loop.vision.patching import patch_torch, unpatch_torch

__all__ = [
    "DefaultOps",
    "NanoConfigError",
    "NanoError",
    "NanoWarning",
    "NanoWorkerError",
    "SetupReport",
    "StepResult",
    "TorchNano",
    "Tuning",
    "Verification",
    "__version__",
    "accelerated",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "default_ops",
    "disable_casts",
    "global_rank",
    "is_global_zero",
    "local_rank",
    "nano",
    "optim",
    "patch_cuda",
    "patch_torch",
    "tune",
    "unpatch_cuda",
    "unpatch_torch",
    "verify",
    "world_size",
]

# No name of a function is that of its module: importing a module makes it an attribute of the package, and
# `__getattr__` is not asked for what is there.
_HOMES = {
    "DefaultOps": "precision.default_ops",
    "SetupReport": "report",
    "StepResult": "report",
    "TorchNano": "torch_nano",
    "Tuning": "tuning_call",
    "Verification": "verification",
    "accelerated": "context_manager",
    "all_gather": "distributed.collectives",
    "all_reduce": "distributed.collectives",
    "barrier": "distributed.collectives",
    "broadcast": "distributed.collectives",
    "default_ops": "precision.default_ops",
    "disable_casts": "precision.autocast",
    "global_rank": "distributed.collectives",
    "is_global_zero": "distributed.collectives",
    "local_rank": "distributed.collectives",
    "nano": "decorator",
    "patch_cuda": "cuda_calls.patching",
    "patch_torch": "vision.patching",
    "tune": "tuning_call",
    "unpatch_cuda": "cuda_calls.patching",
    "unpatch_torch": "vision.patching",
    "verify": "verification",
    "world_size": "distributed.collectives",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "optim":
        return importlib.import_module("nano_loop.optim")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"nano_loop.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
