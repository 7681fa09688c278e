"""Compiles the repeated blocks of a model, or the whole model, in place with `torch.compile`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from nano_loop.compile.blocks import described, repeated_blocks
from nano_loop.compile.inductor import arguments_with, own_cache
from nano_loop.patching.lifetime import WeakIdKeyDictionary, weakly
from nano_loop.patching.torch_private_compiler import call_compiled, forget_compiled, is_compiled, plain_call
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.step import SkipReason, Step

_numbers = itertools.count()
_TRACING = r"torch\._"  # the modules of torch that trace


class Compile(Step):
    """Compiles modules in place, which keeps their identity, their keys and their classes.

    Each kind of repeated block, such as the layers of a transformer, is compiled once. A model without repeated blocks
    is compiled as a whole. Compiled code does not call nano_loop's kernels.

    The step is disabled by default. On a CPU, compiling a training step takes ten seconds to a minute, and the result
    is rarely much faster than with the other steps.
    """

    name = "compile"
    required = False

    @override
    def begin(self) -> None:
        self._compiled: Any = WeakIdKeyDictionary()  # report lines by model
        self._arguments: dict[str, Any] | None = None

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if parts.models and all(isinstance(model, torch.jit.ScriptModule) for model in parts.models):
            return SkipReason("scripted", "the model is scripted")
        return None if self._uncompiled(parts) else SkipReason("compiled", "the model is already compiled")

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._compiled:
            self.undoing.enter_context(own_cache())
            self._hide_what_torch_hides()
        models = self._uncompiled(parts)
        for model in models:
            if model not in self._compiled:
                self._compiled[model] = self._compile(model)
        said = dict.fromkeys(self._compiled[model] for model in models)
        return f"torch.compile, at the first call: {', '.join(said)}"

    def _hide_what_torch_hides(self) -> None:
        """Ignore a warning that torch raises when a block's input has a gradient.

        torch hides it, but does not prevent it from being raised if warnings are errors.
        """
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning, _TRACING)
        self.undoing.callback(_remove_filter, warnings.filters[0])

    def _uncompiled(self, parts: TrainingObjects) -> list[nn.Module]:
        """Return the models that the user has not compiled."""
        fitting = [model for model in parts.models if not isinstance(model, torch.jit.ScriptModule)]
        return [model for model in fitting if model in self._compiled or not is_compiled(model)]

    def _compile(self, model: nn.Module) -> str:
        """Compile a model or its blocks, and return the report line."""
        groups = [] if self.options.compile == "whole" else repeated_blocks(model)
        for group in groups or [[model]]:
            compiled = torch.compile(_caller(class_name(group[0])), **self._torchs_arguments())
            for module in group:
                if not is_compiled(module):  # by the user
                    self.undoing.callback(weakly(forget_compiled, module))
                    call_compiled(module, compiled)
        return described(groups) if groups else f"all of {class_name(model)}"

    def _torchs_arguments(self) -> dict[str, Any]:
        if self._arguments is None:
            self._arguments = arguments_with(self.options.compile if isinstance(self.options.compile, dict) else {})
        return self._arguments


def _caller(name: str) -> Callable[..., Any]:
    """Return a function that calls a module.

    torch limits how often it compiles one code object, and treats sizes that differ between calls of the same name and
    line as dynamic. So each function is a separate object with a separate name.
    """
    code = plain_call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return FunctionType(code, plain_call.__globals__, code.co_name)


def _remove_filter(own: object) -> None:
    if own in warnings.filters:
        warnings.filters.remove(own)  # type: ignore[attr-defined]
