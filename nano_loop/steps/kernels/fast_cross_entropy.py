"""Computes cross-entropy over many classes in one pass over the logits, and its gradient in another."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from typing_extensions import override

from nano_loop.kernels.loss import cross_entropy
from nano_loop.patching.members import parameters_of
from nano_loop.patching.operators.upcasts import upcasts_noted
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason

#: Minimum number of outputs of a layer. With fewer classes, the loss is a small part of a step.
MANY = 1000


class FastCrossEntropy(KernelStep):
    """Replaces `torch.nn.functional.cross_entropy` for the logits of set-up models.

    It is for reduced precision, and for models whose products round. Gains most where a language model has many words:
    torch needs tensors of several times the size of the logits. Logits and targets of other shapes, and class weights,
    are torch's.
    """

    name = "fast_cross_entropy"
    takes_fp32 = True
    replacements = cross_entropy.REPLACEMENTS
    kernel = cross_entropy.KERNEL
    says = "one pass over the logits for the loss, one for the gradient"
    absent = SkipReason("few_classes", f"no layer has {MANY:,} outputs or more")
    calls_torchs_kernels = False

    @staticmethod
    @override
    def is_for(model: nn.Module) -> bool:
        return any(parameter.dim() >= 2 and parameter.size(0) >= MANY for parameter in parameters_of(model))

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        noted = [upcasts_noted()] if self.options.reduced_precision else []
        return [*super().contexts(), *noted]
