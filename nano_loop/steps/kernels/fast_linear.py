"""Computes the products of linear layers, and of their gradients, by C functions."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from nano_loop.kernels.linear import fp32_product, linear, product
from nano_loop.patching.members import parameters_of
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernels.kernel_step import KernelStep

#: Minimum number of elements of a weight. A model of smaller ones only loses the time that a replaced operator takes.
_LARGE, _LARGE_IN_FP32 = 1 << 17, 1 << 13
_MATRIX = 2


class FastLinear(KernelStep):
    """Replaces the products of matrices in the calls of set-up models and in their backward.

    In reduced precision it replaces those of large bf16 matrices, in fp32 those that were measured to be faster in C.
    """

    name = "fast_linear"
    takes_fp32 = True
    replacements = linear.REPLACEMENTS
    kernel = product.KERNEL
    fp32_kernel = fp32_product.KERNEL
    says = "large products in blocks, by bf16 instructions"

    @staticmethod
    @override
    def is_for(model: nn.Module) -> bool:
        """Whether there is a large matrix that may be multiplied: those of embeddings alone are not."""
        return _has_matrix(model, _LARGE)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        detail = super().apply(parts)
        return detail if self.options.reduced_precision else "products in C where that is measured to be faster"

    @override
    def _is_wanted(self, parts: TrainingObjects) -> bool:
        in_fp32 = self._is_in_fp32
        return super()._is_wanted(parts) or (in_fp32 and any(_has_matrix(one, _LARGE_IN_FP32) for one in parts.models))


def large_weights(model: nn.Module, elements: int) -> Iterator[nn.Parameter]:
    """Yield the parameters of at least so many elements that may be multiplied: not those of embeddings."""
    for module in model.modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield from (weight for weight in parameters_of(module, recurse=False) if weight.numel() >= elements)


def _has_matrix(model: nn.Module, elements: int) -> bool:
    return any(weight.dim() == _MATRIX for weight in large_weights(model, elements))
