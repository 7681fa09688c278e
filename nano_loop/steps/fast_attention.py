"""Computes bf16 attention in blocks in C, or by plain matrix products, in place of torch's CPU kernel."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from nano_loop.intercept.operators import overridden
from nano_loop.kernels.attention import for_set_up_models
from nano_loop.kernels.blocked_attention import unavailable
from nano_loop.parts import Parts, class_name, names_in_forward
from nano_loop.steps.step import Step

_OPERATOR = "scaled_dot_product_attention"


class FastAttention(Step):
    """Replaces `scaled_dot_product_attention` under bf16 autocast, for the calls of set-up models."""

    name = "fast_attention"
    auto_is_for_reduced_precision = True

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.options.reduced_precision:
            return "it is faster in bf16 only"
        if not self.required and not any(map(_attends, parts.models)):
            return "no attention was found in the model"
        return None

    @override
    def apply(self, parts: Parts) -> str:
        for model in parts.models:
            self.interceptors.meet(model)
        if not self._overridden:
            self.undoing.enter_context(overridden(_OPERATOR, for_set_up_models, "AutocastCPU"))
            self._overridden = True
        reason = unavailable()
        return "in blocks, by a kernel in C" if reason is None else f"by plain bf16 products: {reason}"

    _overridden = False


def _attends(model: nn.Module) -> bool:
    """Whether a module of the model is named after attention, or calls torch's attention function."""
    return any("attention" in name.lower() or "attn" in name.lower() for name in _names(model))


def _names(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        yield name
        yield class_name(module)
        yield from names_in_forward(module)
