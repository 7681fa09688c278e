"""Computes the products of linear layers, and of their gradients, by a C function in reduced precision."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from nano_loop.intercept.operators import gives_kernels, overridden
from nano_loop.kernels import linear, product
from nano_loop.parts import Parts
from nano_loop.steps.step import Step

#: Minimum number of elements of a weight. A model of smaller ones only loses the time that a replaced operator takes.
_LARGE = 1 << 17
_MATRIX = 2


class FastLinear(Step):
    """Replaces the products of large bf16 matrices in the calls of set-up models and in their backward."""

    name = "fast_linear"
    auto_is_for_reduced_precision = True

    @override
    def is_relevant(self, parts: Parts) -> bool:
        """Return whether the step was asked for, or a model has a large matrix: the others have no line."""
        return super().is_relevant(parts) and (self.required or any(map(_has_large_matrix, parts.models)))

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.options.reduced_precision:
            return "it is for bf16"
        if not gives_kernels():
            return f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        return product.unavailable()

    @override
    def apply(self, parts: Parts) -> str:
        for model in parts.models:
            self.interceptors.meet(model)
        if not self._overridden:
            for operator, make in linear.REPLACEMENTS.items():
                self.undoing.enter_context(overridden(operator, make, "CPU"))
            self._overridden = True
        return "large products in blocks, by bf16 instructions"

    _overridden = False


def _has_large_matrix(model: nn.Module) -> bool:
    """Whether there is a large matrix that may be multiplied: those of embeddings alone are not."""
    return any(
        parameter.dim() == _MATRIX and parameter.numel() >= _LARGE
        for module in model.modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    )
