"""Sums the gradients of embeddings up by rows, into a tensor that stays from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from typing_extensions import override

from nano_loop.kernels.embedding import lookup, row_gradient
from nano_loop.patching.members import parameters_of
from nano_loop.steps.kernels.kernel_step import KernelStep


class FastEmbedding(KernelStep):
    """Replaces the autograd kernels of embeddings for large tables of set-up models.

    A step looks up few rows of a large table, and torch fills and adds tensors of the table's size. Fused steps of
    optimizers then update the rows that change (see `nano_loop.optimizers.row_steps`).
    """

    name = "fast_embedding"
    auto_is_for_reduced_precision = False
    takes_fp32 = True
    replacements = lookup.REPLACEMENTS
    kernel = row_gradient.KERNEL
    says = "gradients of rows, in a tensor that stays"
    modules = (nn.Embedding, nn.EmbeddingBag)
    functions = frozenset(("embedding", "embedding_bag"))

    @classmethod
    @override
    def is_for(cls, model: nn.Module) -> bool:
        is_large = any(weight.dim() == 2 and weight.numel() >= lookup.MIN_ELEMENTS for weight in parameters_of(model))
        return is_large and super().is_for(model)

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        return [row_gradient.row_gradients_kept(), *super().contexts()]
