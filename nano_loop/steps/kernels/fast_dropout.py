"""Draws dropout masks with vector instructions; torch's generator draws one element at a time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from typing_extensions import override

from nano_loop.kernels.dropout import bernoulli
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMES = {kind.__name__ for kind in _DROPOUTS}


class FastDropout(KernelStep):
    """Replaces `Tensor.bernoulli_` on the CPU during the run.

    Masks and all later random numbers are the same as in the plain loop. So the step applies in every precision, and
    code that was not set up draws the same numbers as without a run.
    """

    name = "fast_dropout"
    kernel = bernoulli.KERNEL
    says = "torch's own masks, drawn as vectors"
    absent = SkipReason("no_dropout", "the model has no dropout")
    calls_torchs_kernels = False
    auto_is_for_reduced_precision = False
    functions = frozenset(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "bernoulli")
    )
    finds_all = True

    @classmethod
    @override
    def is_for(cls, model: nn.Module) -> bool:
        return any(map(_drops, model.modules())) or super().is_for(model)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        return super().apply(TrainingObjects())  # nothing depends on which model draws

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        return [bernoulli.vectorized_draws()]


def _drops(module: nn.Module) -> bool:
    # nn.LSTM, nn.MultiheadAttention and most user-defined modules store their rate in an attribute `dropout`.
    is_dropout = isinstance(module, _DROPOUTS) or class_name(module) in _NAMES
    rate = getattr(module, "p" if is_dropout else "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
