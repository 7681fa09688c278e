"""Lightning Fabric, imported without side effects, and its precision plugins for a CPU.

Importing Fabric sets environment variables, adds a handler to its logger, changes the format of warnings, and replaces
`torch.compile`. Importing nano_loop must not change the process, so all of these are restored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from nano_loop.config.precisions import PrecisionKind
from nano_loop.integrations.quiet_import import leaving_no_trace
from nano_loop.precision.autocast.autocast import cpu_autocast

_COMPARED = "torchmetrics"


@contextmanager
def _torchmetrics_by_version() -> Iterator[None]:
    """Give Fabric, which imports torchmetrics to see its version, the version alone.

    torchmetrics imports transformers where that is installed, which takes seconds.
    """
    version_only = ModuleType(_COMPARED)
    version_only.__spec__ = ModuleSpec(_COMPARED, None)
    try:
        if _COMPARED in sys.modules:
            raise PackageNotFoundError
        version_only.__version__ = version(_COMPARED)  # type: ignore[attr-defined]
    except PackageNotFoundError:
        yield
        return
    sys.modules[_COMPARED] = version_only
    try:
        yield
    finally:
        if sys.modules.get(_COMPARED) is version_only:
            del sys.modules[_COMPARED]


# By which Lightning logs, if it is imported.
_rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
_REPLACED = ((torch, "compile"), *([] if _rank_zero is None else [(_rank_zero, "log")]))

with leaving_no_trace("lightning_fabric", *_REPLACED), _torchmetrics_by_version():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import ClusterEnvironment, Precision
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy


class OwnPrecision(Precision):
    """Autocast for ``Fabric.autocast()`` only.

    Fabric's own plugins also cast inputs, reject a plain ``loss.backward()``, and take fp16 for bf16.

    Parameters
    ----------
    kind : PrecisionKind
        The precision.
    """

    def __init__(self, kind: PrecisionKind) -> None:
        super().__init__()
        self.kind = kind
        if kind.autocast is not None:
            self.precision = kind.name  # type: ignore[assignment]

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``, which has no effect in a precision without autocast."""
        return nullcontext() if self.kind.autocast is None else cpu_autocast(self.kind.autocast)


__all__ = [
    "ClusterEnvironment",
    "DDPStrategy",
    "Fabric",
    "LightningEnvironment",
    "OwnPrecision",
    "SLURMEnvironment",
    "SingleDeviceStrategy",
]
