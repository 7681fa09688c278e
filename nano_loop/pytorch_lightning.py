"""A strategy, a Trainer and a compiled module that accelerate Lightning, for `pytorch_lightning`.

`nano_loop.lightning` has the same for Lightning's other package.
"""

from __future__ import annotations

from typing import Any

from nano_loop.config.leftovers import no_attribute
from nano_loop.integrations.lightning.compiled import CompiledMixin
from nano_loop.integrations.lightning.strategy import NanoStrategyMixin, lightning_is_missing, register
from nano_loop.integrations.lightning.trainer import NanoTrainerMixin

try:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry
except ModuleNotFoundError as error:
    raise lightning_is_missing("pytorch_lightning", __name__) from error

__all__ = ["CompiledModule", "NanoStrategy", "Trainer", "strategy"]


class NanoStrategy(NanoStrategyMixin, ParallelStrategy):  # type: ignore[misc, unused-ignore]
    """The strategy "nano"; see `NanoStrategyMixin`."""


class CompiledModule(CompiledMixin, pl.LightningModule):  # type: ignore[misc, unused-ignore]
    """What `Trainer.compile` returns; see `CompiledMixin`."""


class Trainer(NanoTrainerMixin, pl.Trainer):  # type: ignore[misc, unused-ignore]
    """Lightning's Trainer with this strategy; see `NanoTrainerMixin`."""

    _nano_strategy, _nano_compiled, _nano_lightning_module = NanoStrategy, CompiledModule, pl.LightningModule


NanoStrategy.__doc__, Trainer.__doc__ = NanoStrategyMixin.__doc__, NanoTrainerMixin.__doc__  # for `help`
strategy = register(NanoStrategy, StrategyRegistry)


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name)
