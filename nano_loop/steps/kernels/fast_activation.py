"""Computes tanh, and GELU by tanh, in C."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from nano_loop.kernels.activation import activations
from nano_loop.runtime.objects.training_objects import names_in_forward
from nano_loop.steps.kernels.kernel_step import KernelStep


class FastActivation(KernelStep):
    """Replaces tanh, and GELU by tanh, of large bf16 tensors in the calls of set-up models.

    torch's hyperbolic tangent is bound by its arithmetic, and takes three times as long and more.
    """

    name = "fast_activation"
    replacements = activations.REPLACEMENTS
    kernel = activations.KERNEL
    says = "tanh, and GELU by tanh, in C"

    @staticmethod
    @override
    def is_for(model: nn.Module) -> bool:
        return any("tanh" in name.lower() or "gelu" in name.lower() for name in _names(model))


def _names(model: nn.Module) -> Iterator[str]:
    """Yield what may show that a module computes tanh."""
    for module in model.modules():
        if isinstance(module, nn.GELU):
            yield module.approximate
        elif type(module).__qualname__ != "GELUActivation":  # that of transformers, by the error function
            yield type(module).__qualname__
            yield from names_in_forward(module)
