"""Accelerate a plain PyTorch training loop on CPUs without changes to its body.

The public names are imported on first use, so that ``import nano_loop`` and the command line do not wait for torch.
`TorchNano` also imports Fabric, which takes as long as importing torch.
"""

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nano_loop.errors import NanoConfigError, NanoError, NanoMemoryError, NanoWarning, NanoWorkerError
from nano_loop.version import __version__

if TYPE_CHECKING:
    from nano_loop import optim
    from nano_loop.api.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        global_rank,
        is_global_zero,
        local_rank,
        share,
        world_size,
    )
    from nano_loop.api.context_manager import accelerated, install, report, uninstall
    from nano_loop.api.decorator import nano
    from nano_loop.api.image_cache import patch_torch, unpatch_torch
    from nano_loop.api.torch_nano import TorchNano
    from nano_loop.api.verification import Verification, verify
    from nano_loop.integrations.cuda_calls import patch_cuda, unpatch_cuda
    from nano_loop.precision.autocast.autocast import disable_casts
    from nano_loop.precision.autocast.default_ops import DefaultOps, default_ops
    from nano_loop.runtime.objects.report import SetupReport, StepResult

__all__ = [
    "DefaultOps",
    "NanoConfigError",
    "NanoError",
    "NanoMemoryError",
    "NanoWarning",
    "NanoWorkerError",
    "SetupReport",
    "StepResult",
    "TorchNano",
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
    "install",
    "is_global_zero",
    "local_rank",
    "nano",
    "optim",
    "patch_cuda",
    "patch_torch",
    "report",
    "share",
    "uninstall",
    "unpatch_cuda",
    "unpatch_torch",
    "verify",
    "world_size",
]

# A function must not share the name of its module: importing the module makes it an attribute of the package, and
# `__getattr__` is called only for missing attributes.
_NAMES = {
    "api.collectives": (
        *("all_gather", "all_reduce", "barrier", "broadcast"),
        *("global_rank", "is_global_zero", "local_rank", "share", "world_size"),
    ),
    "api.context_manager": ("accelerated", "install", "report", "uninstall"),
    "api.decorator": ("nano",),
    "api.image_cache": ("patch_torch", "unpatch_torch"),
    "api.torch_nano": ("TorchNano",),
    "api.verification": ("Verification", "verify"),
    "integrations.cuda_calls": ("patch_cuda", "unpatch_cuda"),
    "precision.autocast.autocast": ("disable_casts",),
    "precision.autocast.default_ops": ("DefaultOps", "default_ops"),
    "runtime.objects.report": ("SetupReport", "StepResult"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "optim":
        return _imported("optim")
    if name not in _HOMES:
        raise _imported("config.leftovers").no_attribute(__name__, name)
    value = getattr(_imported(_HOMES[name]), name)
    globals()[name] = value
    return value


def _imported(module: str) -> ModuleType:
    """Import a module with garbage collection off: scanning all objects of torch takes 70 ms of 160."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"nano_loop.{module}")
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    # Without the names that this module imports, so that completion lists the public ones.
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
