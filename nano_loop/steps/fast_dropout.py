"""Draws dropout masks with vector instructions; torch's generator draws one element at a time."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from nano_loop.kernels.bernoulli import unavailable, vectorized_draws
from nano_loop.parts import Parts, class_name
from nano_loop.steps.step import Step

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMES = {kind.__name__ for kind in _DROPOUTS}


class FastDropout(Step):
    """Replaces `Tensor.bernoulli_` on the CPU during the run.

    Masks and all later random numbers are the same as in the plain loop. So the step applies in every precision, and
    code that was not set up draws the same numbers as without a run.
    """

    name = "fast_dropout"

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.required and not any(map(_has_dropout, parts.models)):
            return "the model has no dropout"
        return unavailable()

    @override
    def apply(self, parts: Parts) -> str:
        if not self._overridden:
            self.undoing.enter_context(vectorized_draws())
            self._overridden = True
        return "torch's own masks, drawn as vectors"

    _overridden = False


def _has_dropout(model: nn.Module) -> bool:
    return any(map(_drops, model.modules()))


def _drops(module: nn.Module) -> bool:
    # nn.LSTM, nn.MultiheadAttention and most user-defined modules store their rate in an attribute `dropout`.
    is_dropout = isinstance(module, _DROPOUTS) or class_name(module) in _NAMES
    rate = getattr(module, "p" if is_dropout else "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
