"""Accelerates a plain PyTorch training loop on CPUs without changes to its body."""

from nano_loop.accelerated import accelerated
from nano_loop.decorator import nano
from nano_loop.errors import NanoConfigError, NanoError, NanoWarning, NanoWorkerError
from nano_loop.precision.autocast import disable_casts
from nano_loop.report import SetupReport, StepResult
from nano_loop.torch_nano import TorchNano
from nano_loop.version import __version__

__all__ = [
    "NanoConfigError",
    "NanoError",
    "NanoWarning",
    "NanoWorkerError",
    "SetupReport",
    "StepResult",
    "TorchNano",
    "__version__",
    "accelerated",
    "disable_casts",
    "nano",
]
