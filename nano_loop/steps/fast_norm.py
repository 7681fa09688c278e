"""Computes batch norms, group norms and layer norms, and their gradients, in two passes over their tensors."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from nano_loop.intercept.operators import gives_kernels
from nano_loop.kernels.norms import replaced, unavailable
from nano_loop.parts import Parts, class_name
from nano_loop.steps.step import Step

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
    *(nn.GroupNorm, nn.LayerNorm),
)
_NAMES = {kind.__name__ for kind in _NORMS}


class FastNorm(Step):
    """Replaces the CPU kernels of norms for set-up models, in reduced precision.

    Gains most where images are in NHWC: torch's backward of a group norm takes ten times as long there, and its batch
    norms reach a third of the memory's rate. Norms that are small or in another layout are torch's.
    """

    name = "fast_norm"
    auto_is_for_reduced_precision = True

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.options.reduced_precision:
            return "in fp32 its sums would be rounded in another order than torch's"
        if not gives_kernels():
            return f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        if not self.required and not any(map(_normalizes, parts.models)):
            return "no norm was found in the model"
        return unavailable()

    @override
    def apply(self, parts: Parts) -> str:
        for model in parts.models:
            self.interceptors.meet(model)
        if not self._replaced:
            self.undoing.enter_context(replaced())
            self._replaced = True
        return "two passes over the tensors, forward and backward"

    _replaced = False


def _normalizes(model: nn.Module) -> bool:
    return any(isinstance(module, _NORMS) or class_name(module) in _NAMES for module in model.modules())
