"""Lightning Fabric, imported without side effects, and its precision plugins for a CPU.

Importing Fabric sets environment variables, adds a handler to its logger, changes the format of warnings, and replaces
`torch.compile`. Importing nano_loop must not change the process, so all of these are restored.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from nano_loop.precision.autocast import bf16_autocast


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    if "lightning_fabric" in sys.modules:  # the user imported it, so its effects are already there
        yield
        return
    environment, compile_, format_ = dict(os.environ), torch.compile, warnings.formatwarning
    collects = gc.isenabled()
    gc.disable()  # the import creates no garbage, and collection would take a fifth of its time
    logger = logging.getLogger("lightning_fabric")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if collects:
            gc.enable()
        os.environ.clear()
        os.environ.update(environment)
        torch.compile, warnings.formatwarning = compile_, format_
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


with _leaving_no_trace():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import ClusterEnvironment, Precision
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy
    from lightning_fabric.utilities.rank_zero import rank_zero_only


def note_rank(rank: int) -> int:
    """Set the rank of this process for Fabric's messages, and return the previous one."""
    before = int(getattr(rank_zero_only, "rank", 0))
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    return before


class Bf16Precision(Precision):
    """bf16 autocast for ``Fabric.autocast()`` only.

    Fabric's own plugin also casts inputs and rejects a plain ``loss.backward()``.
    """

    precision = "bf16-mixed"

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``."""
        return bf16_autocast()


class Fp32Precision(Precision):
    """No autocast."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``, which has no effect."""
        return nullcontext()


__all__ = [
    "Bf16Precision",
    "ClusterEnvironment",
    "DDPStrategy",
    "Fabric",
    "Fp32Precision",
    "LightningEnvironment",
    "SLURMEnvironment",
    "SingleDeviceStrategy",
    "note_rank",
]
