"""Computes cross-entropy over many classes in one pass over the logits, and its gradient in another."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from nano_loop.intercept.operators import overridden
from nano_loop.intercept.upcasts import upcasts_noted
from nano_loop.kernels.cross_entropy import outside_autocast, unavailable, under_autocast
from nano_loop.parts import Parts
from nano_loop.steps.step import Step

_OPERATOR = "cross_entropy_loss"
#: Minimum number of outputs of a layer. With fewer classes, the loss is a small part of a step.
MANY = 1000


class FastCrossEntropy(Step):
    """Replaces `torch.nn.functional.cross_entropy` for the logits of set-up models, in reduced precision.

    Gains most where a language model has many words: torch needs tensors of several times the size of the logits.
    Logits and targets of other shapes, and class weights, are torch's.
    """

    name = "fast_cross_entropy"
    auto_is_for_reduced_precision = True

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.options.reduced_precision:
            return "in fp32 its sums would be rounded in another order than torch's"
        if not self.required and not any(map(_has_many_outputs, parts.models)):
            return f"no layer has {MANY:,} outputs or more"
        return unavailable()

    @override
    def apply(self, parts: Parts) -> str:
        for model in parts.models:
            self.interceptors.meet(model)
        if not self._overridden:
            for context in (
                overridden(_OPERATOR, under_autocast, "AutocastCPU"),
                overridden(_OPERATOR, outside_autocast, "AutogradCPU"),
                upcasts_noted(),
            ):
                self.undoing.enter_context(context)
            self._overridden = True
        return "one pass over the logits for the loss, one for the gradient"

    _overridden = False


def _has_many_outputs(model: nn.Module) -> bool:
    return any(each.dim() >= 2 and each.size(0) >= MANY for each in model.parameters())
