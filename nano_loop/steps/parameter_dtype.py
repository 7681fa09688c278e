"""Runs the models with parameters, buffers and inputs in another dtype: ``precision="64"`` and ``"bf16-true"``."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.errors import NanoConfigError, error_message
from nano_loop.optimizers.split import SplitWeights
from nano_loop.patching.calls.calls import DTYPES, Call, CallWrapper
from nano_loop.patching.members import parameters_of, shaped
from nano_loop.patching.nested_tensors import Substitution, map_tensors
from nano_loop.patching.optimizers import called_after_steps, held_by
from nano_loop.precision.autocast.call_under_autocast import explain
from nano_loop.precision.autocast.conversion import Conversion
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.allocator import trim
from nano_loop.steps.step import Step


class ParameterDtype(Step):
    """Converts parameters and buffers for the run, floating-point inputs at each call, and outputs back to fp32."""

    name = "precision"

    @override
    def begin(self) -> None:
        self._conversion: Conversion | None = None

    @property
    @override
    def enabled(self) -> bool:
        return self.options.kind.parameters is not None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        dtype = self.options.kind.parameters
        assert dtype is not None
        if self._conversion is None:
            self.undoing.callback(self.split_weights.clear)
            to_fp32 = self.split_weights.restored if dtype is torch.bfloat16 else None
            self._conversion = Conversion(dtype, to_fp32, trim)
            self.undoing.callback(self._conversion.restore)
            if dtype is torch.float64:
                self.undoing.enter_context(called_after_steps(self._note))
        held = chain.from_iterable(map(held_by, parts.optimizers))
        trained = {parameter.data_ptr() for parameter in shaped(held)}
        split = partial(self.split_weights.narrowed, split=trained) if dtype is torch.bfloat16 else None
        conversion = self._conversion
        for model in parts.models:
            conversion.convert(model, split)
            interceptor = self.interceptors.add(model, self.name, _casting_outputs(conversion, self.split_weights))
            interceptor.around_modules(lambda module: _casting_inputs(conversion), DTYPES)
        for optimizer in parts.optimizers:
            if any(map(conversion.is_alias, shaped(held_by(optimizer)))):
                name = type(optimizer).__name__
                got = f"precision={self.options.precision!r}: {name} steps a tensor that weights are views of"
                expected = "weights have separate memory in such a run, so they would not be trained"
                advice = "Pass the weights to the optimizer, as in SGD(model.parameters()), or omit precision"
                raise NanoConfigError(error_message(got, expected, advice))
        if dtype is torch.float64:  # under bf16 the optimizer computes in fp32: see `OptimizerState`
            for optimizer in parts.optimizers:
                self._conversion.convert_state(optimizer)
        empty = [class_name(model) for model in parts.models if next(parameters_of(model), None) is None]
        return "; ".join([self.options.kind.summary, *(f"{name} has no parameters" for name in empty)])

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the state of an optimizer that the loop has created."""
        assert self._conversion is not None
        self._conversion.note_state(optimizer)


_MADE = "Create it with the dtype of another tensor, as with x.new_zeros(...)"


def _casting_inputs(conversion: Conversion) -> Call:
    """Return a wrapper around each call of a module, including calls that a method of the model makes in a loop."""
    dtype = conversion.dtype

    def inward(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype is not dtype and tensor.is_floating_point() else tensor

    def call(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        substitution = Substitution(inward)
        args, kwargs = substitution(args), substitution(kwargs)
        try:
            if not isinstance(self, LazyModuleMixin):
                return function(self, *args, **kwargs)
            # Its own hook, which runs first, initializes the parameters in fp32, as in the plain loop.
            with self.register_forward_pre_hook(lambda module, _: conversion.convert_added(module)):
                return function(self, *args, **kwargs)
        finally:
            substitution.restore()

    return call


def _casting_outputs(conversion: Conversion, weights: SplitWeights) -> CallWrapper:
    dtype = conversion.dtype

    def outward(tensor: Tensor) -> Tensor:
        # A parameter that a method of the model returns must stay the same object.
        is_to_cast = tensor.dtype is dtype and not isinstance(tensor, nn.Parameter)
        return tensor.to(torch.float32) if is_to_cast else tensor

    def layer(call: Call) -> Call:
        def with_casts(function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                weights.end_steps()  # `conversion` would take fp32 weights for added ones
                conversion.convert_added(module)
            try:
                outputs = call(function, module, *args, **kwargs)
            except RuntimeError as error:
                explain(error, f"its parameters and inputs are {dtype}, and a tensor made in the model is not", _MADE)
                raise
            return map_tensors(outward, outputs) if torch.compiler.is_compiling() else Substitution(outward)(outputs)

        return with_casts

    return layer
