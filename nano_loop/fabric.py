"""Lightning Fabric, without what its import does to the process, and set up for a CPU.

Importing Fabric sets environment variables, gives its logger a handler, changes how warnings are formatted, and
replaces `torch.compile`. Importing nano_loop must change nothing, so all of that is put back.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from nano_loop.mechanisms.autocast import bf16_autocast


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    if "lightning_fabric" in sys.modules:  # the user imported it, and has its effects already
        yield
        return
    environment, compile_, format_ = dict(os.environ), torch.compile, warnings.formatwarning
    logger = logging.getLogger("lightning_fabric")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.compile, warnings.formatwarning = compile_, format_
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


with _leaving_no_trace():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import Precision
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy


class Bf16Precision(Precision):
    """bf16 autocast for ``Fabric.autocast()``, and nothing else.

    Fabric's own also casts inputs, and refuses a plain ``loss.backward()``.
    """

    precision = "bf16-mixed"

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``."""
        return bf16_autocast()


class Fp32Precision(Precision):
    """No autocast."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``, which does nothing."""
        return nullcontext()


def fabric_arguments(precision: str) -> dict[str, Any]:
    """Return what `Fabric.__init__` needs for one process on the CPU.

    Parameters
    ----------
    precision : {"32-true", "bf16-mixed"}
        The precision in force.

    Returns
    -------
    dict
        The strategy and the cluster environment are given outright, for Fabric takes a mere ``SLURM_NTASKS`` in the
        environment for a launch.
    """
    plugin = Bf16Precision() if precision == "bf16-mixed" else Fp32Precision()
    strategy = SingleDeviceStrategy(torch.device("cpu"), precision=plugin)
    return {"accelerator": "cpu", "devices": 1, "strategy": strategy, "plugins": [LightningEnvironment()]}


__all__ = ["Fabric", "fabric_arguments"]
