"""Computes bf16 attention in blocks in C, or by plain matrix products, in place of torch's CPU kernel."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from nano_loop.kernels.attention import attention, blocked_attention
from nano_loop.runtime.objects.training_objects import class_name, names_in_forward
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason


class FastAttention(KernelStep):
    """Replaces `scaled_dot_product_attention` under bf16 autocast, for the calls of set-up models."""

    name = "fast_attention"
    replacements = attention.REPLACEMENTS
    kernel = blocked_attention.KERNEL
    says = "in blocks, by a kernel in C"
    says_without_kernel = "by plain bf16 products: "
    absent = SkipReason("no_attention", "no attention was found in the model")
    calls_torchs_kernels = False
    functions = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))
    finds_all = True

    @classmethod
    @override
    def is_for(cls, model: nn.Module) -> bool:
        """Whether a module of the model is named after attention, or calls torch's attention function."""
        is_named = any("attention" in name.lower() or "attn" in name.lower() for name in _names(model))
        return is_named or super().is_for(model)


def _names(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        yield name
        yield class_name(module)
        yield from names_in_forward(module)
