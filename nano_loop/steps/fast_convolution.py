"""Computes some gradients of bf16 convolutions by plain products and sums, where that beats torch's CPU kernel."""

from __future__ import annotations

import torch
from torch import nn

from nano_loop.intercept.operators import overridden
from nano_loop.kernels.convolution import faster_backward
from nano_loop.parts import Parts
from nano_loop.steps.step import Step

_OPERATOR = "convolution_backward"
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class FastConvolution(Step):
    """Stands in for torch's backward of convolutions during the run, and hands to it what it does not do faster."""

    name = "fast_convolution"
    auto_is_for_reduced_precision = True

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if not self.config.reduced_precision:
            return "it is faster in bf16 only"
        if not hasattr(torch.library, "get_kernel"):
            return f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        if not self.required and not any(map(_convolves, parts.models)):
            return "no convolution was found in the model"
        return None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        if not self._overridden:
            backward = faster_backward(torch.library.get_kernel(f"aten::{_OPERATOR}", "CPU"))
            self.undoing.enter_context(overridden(_OPERATOR, backward, "CPU", with_keyset=True))
            self._overridden = True
        return "weights' gradients by plain bf16 products where oneDNN is slow"

    _overridden = False


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(module, _CONVOLUTIONS) for module in model.modules())
