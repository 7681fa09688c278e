"""Draws dropout's masks with a vectorised generator, where torch's own is one scalar thread."""

from __future__ import annotations

from functools import partial

from torch import nn

from nano_loop.intercept.operators import overridden
from nano_loop.kernels.bernoulli import Crew, bernoulli_
from nano_loop.parts import Parts
from nano_loop.steps.step import Step

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class FastDropout(Step):
    """Stands in for `Tensor.bernoulli_` on the CPU during the run.

    The masks are others than the plain loop draws, of the same kind: independent, with the rate rounded to 1/65536,
    and repeated by `torch.manual_seed`. So "auto" leaves an fp32 run alone, which is to draw the plain loop's masks.
    """

    name = "fast_dropout"
    auto_is_for_reduced_precision = True

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if self.required:
            return None
        if not self.config.reduced_precision:
            return "fp32 keeps the masks of the plain loop"
        if "Intel" in self.machine.name:
            return "torch's own generator is vectorised on Intel's CPUs"
        if not any(map(_has_dropout, parts.models)):
            return "the model has no dropout"
        return None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        if not self._overridden:
            crew = Crew()
            self.undoing.callback(crew.close)
            draw = partial(bernoulli_, spread=crew.spread)
            self.undoing.enter_context(overridden("bernoulli_.float", draw, "CPU"))
            self._overridden = True
        return "masks from SFC64, rates rounded to 1/65536"

    _overridden = False


def _has_dropout(model: nn.Module) -> bool:
    return any(map(_drops, model.modules()))


def _drops(module: nn.Module) -> bool:
    # nn.LSTM and nn.MultiheadAttention keep their rate in an attribute of that name, as do most users' own modules.
    rate = module.p if isinstance(module, _DROPOUTS) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
