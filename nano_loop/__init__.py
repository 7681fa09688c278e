"""Accelerates a plain PyTorch training loop on CPUs without changes to its body."""

from typing import TYPE_CHECKING, Any

from nano_loop import optim
from nano_loop.accelerated import accelerated
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
from nano_loop.errors import NanoConfigError, NanoError, NanoWarning, NanoWorkerError
from nano_loop.precision.autocast import disable_casts
from nano_loop.precision.default_ops import DefaultOps, default_ops
from nano_loop.report import SetupReport, StepResult
from nano_loop.verification import Verification, verify
from nano_loop.version import __version__

if TYPE_CHECKING:
    from nano_loop.torch_nano import TorchNano

__all__ = [
    "DefaultOps",
    "NanoConfigError",
    "NanoError",
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
    "is_global_zero",
    "local_rank",
    "nano",
    "optim",
    "verify",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Import `TorchNano` when it is first used: it is a Fabric, whose import takes as long as that of torch."""
    if name != "TorchNano":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nano_loop.torch_nano import TorchNano

    globals()[name] = TorchNano
    return TorchNano


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
