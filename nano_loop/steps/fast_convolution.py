"""Computes gradients of bf16 convolutions by a C function, or by products and sums, where torch's kernel is slower."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from nano_loop.intercept.operators import gives_kernels, overridden
from nano_loop.kernels import weight_gradient
from nano_loop.kernels.convolution import for_set_up_models
from nano_loop.parts import Parts, class_name
from nano_loop.steps.step import Step

_OPERATOR = "convolution_backward"
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NAMES = {kind.__name__ for kind in _CONVOLUTIONS}


class FastConvolution(Step):
    """Replaces the backward of the set-up models' convolutions, and calls torch's kernel where that one is faster."""

    name = "fast_convolution"
    auto_is_for_reduced_precision = True

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.options.reduced_precision:
            return "it is faster in bf16 only"
        if not gives_kernels():
            return f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        if not self.required and not any(map(_convolves, parts.models)):
            return "no convolution was found in the model"
        return None

    @override
    def apply(self, parts: Parts) -> str:
        for model in parts.models:
            self.interceptors.meet(model)
        if not self._overridden:
            self.undoing.enter_context(overridden(_OPERATOR, for_set_up_models, "CPU"))
            self._overridden = True
        reason = weight_gradient.unavailable()
        if reason is None:
            return "weights' gradients in blocks, by bf16 instructions"
        return f"weights' gradients by plain bf16 products where oneDNN is slow, since {reason}"

    _overridden = False


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(module, _CONVOLUTIONS) or class_name(module) in _NAMES for module in model.modules())
