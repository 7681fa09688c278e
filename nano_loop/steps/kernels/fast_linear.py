"""Computes the products of linear layers, and of their gradients, by a C function in reduced precision."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from nano_loop.kernels.linear import linear, product
from nano_loop.patching.members import parameters_of
from nano_loop.steps.kernels.kernel_step import KernelStep

#: Minimum number of elements of a weight. A model of smaller ones only loses the time that a replaced operator takes.
_LARGE = 1 << 17
_MATRIX = 2


class FastLinear(KernelStep):
    """Replaces the products of large bf16 matrices in the calls of set-up models and in their backward."""

    name = "fast_linear"
    replacements = linear.REPLACEMENTS
    kernel = product.KERNEL
    says = "large products in blocks, by bf16 instructions"

    @staticmethod
    @override
    def is_for(model: nn.Module) -> bool:
        """Whether there is a large matrix that may be multiplied: those of embeddings alone are not."""
        return any(
            parameter.dim() == _MATRIX and parameter.numel() >= _LARGE
            for module in model.modules()
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for parameter in parameters_of(module, recurse=False)
        )
