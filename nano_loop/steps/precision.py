"""Runs the models under bf16 autocast. Parameters, gradients and model outputs stay fp32."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.errors import NanoConfigError, NanoWarning, error_message
from nano_loop.patching.calls.calls import DTYPES, Call, CallWrapper, is_forward
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import buffers_of, parameters_of
from nano_loop.patching.nested_tensors import Substitution, map_tensors, shares_memory
from nano_loop.patching.optimizers import trained_by
from nano_loop.patching.ownership import OperatorRule
from nano_loop.patching.user_code import warn
from nano_loop.patching.walk import CONTAINERS, items_of, walk
from nano_loop.precision.autocast.autocast import (
    LOW_DTYPES,
    around_recurrent_layer,
    can_train_lstms,
    cpu_autocast,
    to_fp32,
)
from nano_loop.precision.autocast.call_under_autocast import CallUnderAutocast, torch_replaced
from nano_loop.precision.autocast.default_ops import in_force
from nano_loop.precision.autocast.frozen_weights import RoundedOnce, remark_on_frozen, remark_on_integers, rounded_once
from nano_loop.precision.autocast.output_activations import activations_noticed
from nano_loop.precision.autocast.widest_dtype import widest_dtype_computed
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name, has_modules
from nano_loop.steps.op_lists import OpLists
from nano_loop.steps.step import SkipReason, Step


class Precision(Step):
    """Enters autocast for each outermost call into a model, and exits it when the call returns.

    Autocast caches no weights, which the model may change between two uses; recurrent layers and frozen weights keep
    casts.
    """

    name = "precision"
    required = False

    @override
    def begin(self) -> None:
        self._is_applied = False
        self._interceptors_of: Any = WeakIdKeyDictionary()  # `CallInterceptor` by model
        self._missed: list[str] = []

    @property
    @override
    def enabled(self) -> bool:
        return self.options.kind.autocast is not None

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        dtypes = [_uncast_dtype(model) for model in parts.models]
        if dtypes and all(dtypes):
            detail = f"the model's parameters are {dtypes[0]}, which autocast does not cast"
            if self.interceptors.trainings_only:  # the program, which may train others, has not passed this model
                return SkipReason("not_cast", detail)
            got = f"{self.options.as_written['precision']} was requested, and {detail}"
            hint = 'Pass model.float(), or precision="auto"'
            raise NanoConfigError(error_message(got, "it is for models with fp32 parameters", hint))
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        dtype = self.options.kind.autocast
        assert dtype is not None
        if not self.machine.has_fast_bf16:
            self._warn()
        if not self._is_applied:
            self._is_applied = True
            for context in (in_force({}), activations_noticed(), widest_dtype_computed(), torch_replaced()):
                self.undoing.enter_context(context)
            self.undoing.callback(self.clock.after(self._look))
        for model in parts.models:
            if _uncast_dtype(model):
                continue
            once = self.undoing.enter_context(rounded_once(dtype)) if self._remark_on_frozen(model) else None
            state = _low_state(model)
            interceptor = self.interceptors.add(model, self.name, _under_autocast(dtype, model, state, once))
            interceptor.is_left_alone = _merges
            interceptor.convert_output = partial(_substituted, _outward(state, to_fp32))
            interceptor.around_modules(around_recurrent_layer, DTYPES)
            self._interceptors_of[model] = interceptor
            frozen = {} if once is None else once.rules
            lstms = {} if can_train_lstms(dtype) else self._rules_of_lstms()  # an LSTM may be added to the model
            rules = {**frozen, **interceptor.rules.operators, **lstms}
            interceptor.rules = interceptor.rules._replace(operators=rules)
        remarks = [_remark(model, dtype) or self._remark_on_frozen(model) for model in parts.models]
        remarks += map(remark_on_integers, parts.models)
        return "; ".join([self.options.kind.summary, *dict.fromkeys(filter(None, remarks))])

    def _remark_on_frozen(self, model: nn.Module) -> str | None:
        """Return the report line about frozen weights, or None, as when IPEX or a compiler computes the layers."""
        return None if self.options.use_ipex or self.options.compile else remark_on_frozen(model)

    def _rules_of_lstms(self) -> Mapping[str, OperatorRule]:
        """Return the rules that run LSTMs in fp32."""
        lists = OpLists((), ("lstm",))
        self.undoing.enter_context(lists.registered())
        return lists.rules

    @override
    def final_result(self) -> StepResult | None:
        """Return a result about models whose calls were not intercepted, or None."""
        names = ", ".join(self._missed)
        if not names:
            return None
        detail = f"no call of {names} was intercepted"
        return StepResult(self.name, "skipped", detail, code="not_intercepted")

    def _look(self, optimizer: Optimizer) -> None:
        """Warn about a model that this optimizer trains but whose calls were not intercepted."""
        for model, interceptor in [*self._interceptors_of.items()]:
            name = type(model).__name__
            if interceptor.was_called or name in self._missed or not _is_trained(model, optimizer):
                continue
            if self._is_part_of_called(model) or not any(map(_has_forward, model.modules())):
                continue
            self._missed.append(name)
            got = f"{name} is trained in fp32, because nano_loop intercepted no call of it"
            cause = "its weights are used outside of its calls, or by a function that was compiled before the run"
            warnings.warn(error_message(got, cause, _COMPILE_LATER), NanoWarning, stacklevel=3)

    def _is_part_of_called(self, model: nn.Module) -> bool:
        """Whether a model is part of another one whose calls were intercepted."""
        called = (other for other, interceptor in self._interceptors_of.items() if interceptor.was_called)
        return any(module is model for other in called for module in other.modules())

    def _warn(self) -> None:
        got = f"{self.options.as_written['precision']} on {self.machine.name}"
        lack, hint = "this CPU has no bf16 instructions, so bf16 will be slower than fp32", 'Use precision="auto"'
        if "avx2" in self.machine.instruction_sets and "avx512bw" not in self.machine.instruction_sets:
            # torch computes bf16 values one by one there; with AVX-512, oneDNN converts them.
            lack = (
                "this CPU has no bf16 instructions and no AVX-512, so products take up to 400 times as long as in fp32"
            )
        warn(error_message(got, lack, hint))


_COMPILE_LATER = "Call the model. Compile it inside the run, or call torch.compiler.reset() before the run"


_SETTINGS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, *CONTAINERS)


def _merges(method: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a method takes no tensors, like one that merges weights: users put only the forward under autocast."""
    return not is_forward(method) and all(isinstance(value, _SETTINGS) for value in walk((args, kwargs), items_of))


def _uncast_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of a model's weights if autocast casts none of them, or None."""
    dtypes = [
        parameter.dtype for parameter in parameters_of(model) if parameter.is_floating_point() or parameter.is_complex()
    ]
    cast = any(dtype is not torch.float64 and dtype.is_floating_point for dtype in dtypes)
    return None if cast or not dtypes else dtypes[0]


def _remark(model: nn.Module, autocast: torch.dtype) -> str | None:
    """Return the report line about one model, or None."""
    if has_modules(model, (nn.LSTM,)) and not can_train_lstms(autocast):
        name = str(autocast).removeprefix("torch.")
        return f"LSTMs of {class_name(model)} in fp32, since torch cannot train them in {name} on this CPU"
    dtype = _uncast_dtype(model)
    if dtype:
        return f"not {class_name(model)}, whose parameters are {dtype}"
    if next(parameters_of(model), None) is None:
        return f"{class_name(model)} has no parameters, so layers in a plain list belong in an nn.ModuleList"
    return None


def _is_trained(model: nn.Module, optimizer: Optimizer) -> bool:
    held = set(map(id, trained_by(optimizer)))
    return any(id(parameter) in held for parameter in parameters_of(model))


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called, unlike a list of parameters."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _low_state(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers that are bf16 or fp16 before the run, as in the plain loop."""
    state = itertools.chain(parameters_of(model), buffers_of(model))
    return [tensor for tensor in state if tensor.dtype in LOW_DTYPES]


def _outward(state: list[Tensor], cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a cast that skips the low-precision state of a model."""
    if not state:
        return cast
    return lambda tensor: tensor if any(shares_memory(tensor, kept) for kept in state) else cast(tensor)


def _substituted(convert: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    return convert(outputs) if type(outputs) is Tensor else Substitution(convert)(outputs)  # most are a tensor


def _under_autocast(dtype: torch.dtype, model: nn.Module, state: list[Tensor], once: RoundedOnce | None) -> CallWrapper:
    known = weakref.ref(model)

    def layer(call: Call) -> Call:
        def with_autocast(function: Call, /, *args: Any, **kwargs: Any) -> Any:
            # An autocast or a `disable_casts` of the user takes precedence, as in the plain loop.
            if torch.is_autocast_enabled("cpu"):
                return call(function, *args, **kwargs)
            if torch.compiler.is_compiling():
                with cpu_autocast(dtype):
                    outputs = call(function, *args, **kwargs)
                return map_tensors(_outward(state, to_fp32), outputs)
            if once is not None and (called := known()) is not None:
                once.prepare(called)
            with CallUnderAutocast(dtype) as context:
                outputs = call(function, *args, **kwargs)
            return _substituted(_outward(state, context.activations.in_fp32), outputs)

        return with_autocast

    return layer
