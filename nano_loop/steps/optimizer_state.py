"""Steps optimizers over bf16 weights without losing updates, and with bf16 moments: ``optimizer_state="bf16"``."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.optimizers.narrow_states import keep_narrow, take_back
from nano_loop.optimizers.split import SplitWeights
from nano_loop.optimizers.split_steps import SplitSteps, why_not
from nano_loop.optimizers.torch_fused_steps import steps_fused
from nano_loop.patching.attributes import replaced
from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with, weakly
from nano_loop.patching.members import buffers_of, parameters_of
from nano_loop.patching.optimizers import around_closure, held_by
from nano_loop.patching.patch_table import entry_set, process_wide
from nano_loop.patching.torch_private import below_torch_functions, version
from nano_loop.precision.autocast.conversion import convert_data
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.allocator import give_back, trim
from nano_loop.steps.step import Step

_BF16 = "bf16"
_NEEDED = 'parameters and gradients must be dense, in fp32 or with precision="bf16-true", and only lr may be a tensor'


class OptimizerState(Step):
    """Steps SGD, Adam and AdamW in one pass over split weights, and other optimizers over temporary fp32 weights.

    bf16 alone would lose each update that is smaller than 1/512 of the weight, and most of a running mean of squares.
    """

    name = "optimizer_state"
    needs = "trained"

    @override
    def begin(self) -> None:
        self._wide: Any = WeakIdKeyDictionary()  # by optimizer, with weak references
        self._is_applied = False

    @property
    @override
    def enabled(self) -> bool:
        return self._is_split or self._is_narrow

    @property
    def _is_split(self) -> bool:
        return self.options.kind.parameters is torch.bfloat16

    @property
    def _is_narrow(self) -> bool:
        return self.options.optimizer_state == _BF16

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._is_applied:
            self._is_applied = True
            self.undoing.callback(self.clock.before(self._before_step))
            self.undoing.callback(self.clock.after(self._after_step))
            self.undoing.enter_context(replaced(Optimizer, "__getstate__", _with_torchs_states))
            if self._is_split:
                changed = replaced(
                    AveragedModel, "update_parameters", functools.partial(_averaging, self.split_weights)
                )
                self.undoing.enter_context(changed)
        for optimizer in parts.optimizers:
            self._take(optimizer)
        # Undone first: the fp32 tensors that are created after the run do not fit where smaller blocks were freed.
        self.undoing.callback(trim)
        self.undoing.callback(give_back)
        weights = "bf16 weights with 16 extra bits" if self._is_split else "weights unchanged"
        moments = f"moments in {_BF16 if self._is_narrow else 'fp32'}"
        reasons = filter(None, map(why_not, parts.optimizers))
        others = [f"{reason}: weights in fp32 during its steps" for reason in dict.fromkeys(reasons)]
        return "; ".join([f"{weights}, {moments}", *others])

    def _take(self, optimizer: Optimizer) -> None:
        if optimizer in self._wide:
            return
        reason = why_not(optimizer)
        if reason is not None and self._is_narrow:
            raise self._error(optimizer, reason)
        moments = torch.bfloat16 if self._is_narrow else torch.float32
        weights = self.split_weights if self._is_split else None
        steps = None if reason else SplitSteps(weights, moments, len(self._wide))
        wide = WideWeights(weights, steps, self._error if self._is_narrow else None)
        wide.takes(optimizer)
        self._wide[optimizer] = wide
        undoing = undone_with(optimizer, self.undoing)
        undoing.callback(wide.narrow)
        for handle in wide.hooks(optimizer):
            self.undoing.callback(handle.remove)
        if self._is_narrow:
            take_back(optimizer)
            undoing.callback(weakly(keep_narrow, optimizer))
        if steps is not None:
            undoing.enter_context(steps_fused(optimizer, steps))
        self._wrap_modes(optimizer, wide)

    def _error(self, optimizer: Optimizer, reason: str) -> NanoConfigError:
        got = f"{self.options.as_written[self.name]} with {type(optimizer).__name__}"
        return NanoConfigError(error_message(got, reason, 'Omit optimizer_state: its default is "32"'))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._take(optimizer)  # with several processes, it may not have been set up
        return self._wide[optimizer].before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._wide:
            self._wide[optimizer].narrow()

    def _wrap_modes(self, optimizer: Optimizer, wide: WideWeights) -> None:
        """Let the methods with which schedule-free optimizers swap weights compute in fp32 as well."""
        undone_with(optimizer, self.undoing).enter_context(entry_set(_wide_of, id(optimizer), wide))
        for name in _MODES:
            if callable(getattr(type(optimizer), name, None)):
                self.undoing.enter_context(replaced(type(optimizer), name, _in_fp32))


_MODES = ("train", "eval")
_wide_of: dict[int, WideWeights] = process_wide("wide weights, by optimizer", {})


def _in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        wide = _wide_of.get(id(self))
        if wide is None:
            return original(self, *args, **kwargs)
        wide.widen(self, all_of_them=True)
        try:
            return original(self, *args, **kwargs)
        finally:
            wide.narrow()

    return call


def _averaging(weights: SplitWeights, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that updates averages of weights in fp32: in bf16, most updates would be lost."""

    @functools.wraps(original)
    def update_parameters(self: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        averages, trained = (chain(parameters_of(module), buffers_of(module)) for module in (self, model))
        are_written = {id(tensor): tensor for tensor in averages if tensor.dtype is torch.bfloat16}
        read = [tensor for tensor in trained if tensor.dtype is torch.bfloat16]
        if not any(tensor in weights for tensor in read):  # it is not a model of the run
            return original(self, model, *args, **kwargs)
        tensors = [*are_written.values(), *read]
        narrow = [(tensor, tensor.data) for tensor in tensors]
        convert_data(tensors, weights.wide)
        try:
            return original(self, model, *args, **kwargs)
        finally:
            for tensor, data in narrow:
                if id(tensor) in are_written:
                    weights.write(data, tensor.data)
                tensor.data = data

    return update_parameters


def _with_torchs_states(original: Callable[[Optimizer], dict[str, Any]]) -> Callable[[Optimizer], dict[str, Any]]:
    """Return a method that copies and pickles an optimizer with states as torch's: the copy steps as torch does."""

    @functools.wraps(original)
    def getstate(self: Optimizer) -> dict[str, Any]:
        result, wide = original(self), _wide_of.get(id(self))
        if wide is None:
            return result
        return {**result, "state": defaultdict(dict, wide.as_torchs(result["state"]))}

    return getstate


class WideWeights:
    """An optimizer's split weights, if any. They are fp32 in steps that do not run in C, if no `error` forbids them."""

    def __init__(
        self,
        weights: SplitWeights | None,
        steps: SplitSteps | None,
        error: Callable[[Optimizer, str], NanoError] | None,
    ) -> None:
        self._weights, self._steps, self._error = weights, steps, error
        # With the data and gradients in bf16, and gradients in fp32. Views and other processes may share the data.
        self._parameters: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether the next step runs in C."""
        takes = self._steps is not None and self._steps.takes(optimizer)
        if self._error is not None and not takes:
            raise self._error(optimizer, _NEEDED)
        return takes

    def as_torchs(self, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return states with moments in fp32."""
        of_torch = self._steps.as_torchs if self._steps is not None else lambda state: state
        return {key: of_torch(state) for key, state in states.items()}

    def hooks(self, optimizer: Optimizer) -> list[Any]:
        """Register hooks that make an optimizer save and load fp32 states, and return their handles."""
        handles = [
            # Loading casts state to the dtype of the parameters.
            optimizer.register_load_state_dict_pre_hook(lambda loaded, _: self.widen(loaded, all_of_them=True)),
            optimizer.register_load_state_dict_post_hook(lambda *_: self.narrow()),
        ]
        if self._steps is not None:
            handles.append(
                optimizer.register_state_dict_post_hook(
                    lambda _, saved: {**saved, "state": self.as_torchs(saved["state"])}
                )
            )
        return handles

    def widen(self, optimizer: Optimizer, all_of_them: bool = False) -> None:
        """Cast the parameters with gradients, and their gradients, to fp32."""
        if self._weights is None:
            return
        narrow = {
            id(parameter): parameter
            for parameter in held_by(optimizer)
            if parameter.dtype is torch.bfloat16 and (all_of_them or parameter.grad is not None)
        }
        parameters = [*narrow.values()]
        self._weights.ends[self.narrow] = None
        with below_torch_functions():  # the step may run in the user's `disable_casts`
            before = [(parameter.data, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            convert_data(parameters, self._weights.wide)
            for parameter, (data, gradient) in zip(parameters, before, strict=True):
                in_fp32 = parameter.grad = None if gradient is None else gradient.to(torch.float32)
                self._parameters.append((parameter, data, gradient, in_fp32))

    def narrow(self) -> None:
        """Split the parameters again."""
        if self._weights is None:
            return
        self._weights.ends.pop(self.narrow, None)
        with below_torch_functions():
            for parameter, data, gradient, in_fp32 in self._parameters:
                is_kept = parameter.grad is in_fp32
                if gradient is not None and in_fp32 is not None and in_fp32 is not gradient and version(in_fp32):
                    gradient.detach().copy_(in_fp32.detach())  # changed in place, as by `zero_grad(set_to_none=False)`
                parameter.grad = None
                self._weights.write(data, parameter.data)
                parameter.data = data
                parameter.grad = gradient if is_kept else None
        self._parameters.clear()

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast for a step that does not run in C, but not for its closure."""

        def widen_unless_in_c() -> None:
            if not self.takes(optimizer):
                self.widen(optimizer)

        self.narrow()  # the last step may have raised
        return around_closure(args, kwargs, self.narrow, widen_unless_in_c)
