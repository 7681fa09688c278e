"""Computes attention in blocks in C, in place of torch's CPU kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from typing_extensions import override

from nano_loop.kernels.attention import attention, blocked_attention, fp32_attention, rounded_attention
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name, names_in_forward
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason


class FastAttention(KernelStep):
    """Replaces `scaled_dot_product_attention` under bf16 autocast, for the calls of set-up models.

    In fp32, it replaces torch's flash kernel and its backward, where that was measured to be faster.
    """

    name = "fast_attention"
    takes_fp32 = True
    replacements = attention.REPLACEMENTS
    kernel = blocked_attention.KERNEL
    fp32_kernel = fp32_attention.KERNEL
    says = "in blocks, by a kernel in C"
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

    @override
    def is_relevant(self, parts: TrainingObjects) -> bool:
        return super().is_relevant(parts) and (not self._is_in_fp32 or self._is_wanted(parts))

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self._is_in_fp32 and not gives_kernels():
            return SkipReason("old_torch", f"torch {torch.__version__} does not say which kernel an operator has")
        return super().skip_reason(parts)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        detail = super().apply(parts)
        return "in C where that is measured to be faster" if self._is_in_fp32 else detail

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        if not self._is_in_fp32:
            return super().contexts()
        return [replacement.in_force() for replacement in rounded_attention.REPLACEMENTS]


def _names(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        yield name
        yield class_name(module)
        yield from names_in_forward(module)
