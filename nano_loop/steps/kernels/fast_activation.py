"""Computes tanh and GELU in C; and in one pass the GELU that transformers writes as eight operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nano_loop.config.op_names import operators_of
from nano_loop.kernels.activation import activations
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.calls.exports import is_exporting
from nano_loop.patching.torch_private import calls_only_forward, in_functorch
from nano_loop.runtime.objects.training_objects import TrainingObjects, names_in_forward
from nano_loop.steps.kernels.kernel_step import KernelStep

#: Modules that compute GELU by tanh from several operators.
_BY_OPERATORS = {
    ("transformers.activations", "NewGELUActivation"),
    ("transformers.activations", "FastGELUActivation"),
    ("transformers.activations", "AccurateGELUActivation"),
}
#: The operators that they call. Those whose dtype was asked for have to be called.
_CALLED = frozenset({"tanh", "pow", "mul", "add"})


class FastActivation(KernelStep):
    """Replaces tanh, and GELU by tanh, of large tensors in the calls of set-up models.

    torch's hyperbolic tangent is bound by its arithmetic, and takes three times as long and more. GPT-2's GELU, in
    transformers, is eight operators, each of which reads and writes the whole tensor and rounds it to bf16. In fp32,
    the gradient of GELU by the error function is replaced, too.
    """

    name = "fast_activation"
    takes_fp32 = True
    replacements = activations.REPLACEMENTS
    kernel = activations.KERNEL
    says = "tanh, and GELU by tanh, in C"

    @staticmethod
    @override
    def is_for(model: nn.Module) -> bool:
        return any("tanh" in name.lower() or "gelu" in name.lower() for name in _names(model))

    @override
    def apply(self, parts: TrainingObjects) -> str:
        for model in parts.models:
            self.interceptors.for_model(model).around_modules(self._around, self.name)
        detail = super().apply(parts)
        return detail if self.options.reduced_precision else "tanh, GELU by tanh, and gradients of GELU, in C"

    @override
    def _is_wanted(self, parts: TrainingObjects) -> bool:
        modules = [module for model in parts.models for module in model.modules()]
        in_fp32 = not self.options.reduced_precision
        return super()._is_wanted(parts) or (in_fp32 and any(map(_is_exact_gelu, modules)))

    def _around(self, module: nn.Module) -> Call | None:
        listed = itertools.chain(*self.options.listed_operators.values())
        names = {operator.partition(".")[0] for name in listed for operator in operators_of(name)}
        return _in_one_pass if _kind(module) in _BY_OPERATORS and names.isdisjoint(_CALLED) else None


def _in_one_pass(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Compute by one operator a module that is `_BY_OPERATORS`."""
    if kwargs or len(args) != 1 or not _is_supported(self, args[0]):
        return function(self, *args, **kwargs)
    return F.gelu(args[0], approximate="tanh")


def _is_supported(module: nn.Module, x: Any) -> bool:
    is_large = type(x) is Tensor and x.dtype in activations.KINDS and x.numel() >= activations.MIN_ELEMENTS and x.is_cpu
    return is_large and calls_only_forward(module) and not in_functorch() and not is_exporting()


def _kind(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def _is_exact_gelu(module: nn.Module) -> bool:
    """Whether a module computes GELU by the error function: that of torch, or that of transformers."""
    if isinstance(module, nn.GELU):
        return module.approximate == "none"
    return type(module).__qualname__ == "GELUActivation"


def _names(model: nn.Module) -> Iterator[str]:
    """Yield what may show that a module computes tanh."""
    for module in model.modules():
        if isinstance(module, nn.GELU):
            yield module.approximate
        elif not _is_exact_gelu(module):
            yield type(module).__qualname__
            yield from names_in_forward(module)
