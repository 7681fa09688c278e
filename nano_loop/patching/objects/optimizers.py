"""Utilities for optimizers: closures of steps, what steps train, and equal layouts of parameters, gradients and state.

torch's fused CPU optimizers treat parameter, gradient and state as flat memory, without checks. If their strides
differ, each element is silently updated with the gradient of another element (pytorch#110758 reports it for CUDA).
Loading a checkpoint of an NCHW run into a channels_last model is enough.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.objects.gradients import gradient_of
from nano_loop.patching.patch_table import process_wide, shared_change

# --- closures ---

Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure argument of a step, or None. `args` starts with the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether steps of this optimizer cannot do without a closure: as LBFGS, it compares losses of several points."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    first = arguments[0] if arguments else None
    return first is not None and first.kind is first.POSITIONAL_OR_KEYWORD and first.default is first.empty


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the closure replaced by `closure`."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def once_gradients_exist(check: Callable[[Optimizer], None]) -> Callable[[Optimizer, Any, Any], Any]:
    """Return a hook before ``optimizer.step()`` that calls `check` when the gradients of the step exist.

    That is at once, or with a closure after each call of it, since the closure computes the gradients.
    """

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = closure_of(args, kwargs) if len(args) > 1 or kwargs else None
        if closure is None:
            check(optimizer)
            return None

        def checked() -> Any:
            loss = closure()
            check(optimizer)
            return loss

        return with_closure(args, kwargs, checked)

    return before_step


class FusedStepCheck:
    """A hook before the steps of one optimizer that checks the requirements of a fused kernel, once gradients exist.

    A step that has seen that they are met skips the hook (see `nano_loop.optimizers.direct_steps`).
    """

    def __init__(self, check: Callable[[Optimizer], None]) -> None:
        self._before_step = once_gradients_exist(check)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check before a step, or after each call of its closure."""
        return self._before_step(optimizer, args, kwargs)


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that a step would train now: with a gradient, and a learning rate other than 0.

    `torch.distributed.checkpoint` makes the state of a new optimizer by a step with gradients and rates of 0.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") is None or group["lr"]]
    return [parameter for group in groups for parameter in group["params"] if gradient_of(parameter) is not None]


# --- hooks of all optimizers ---


_StepHook = Callable[[Optimizer, Any, Any], Any]
_before_steps: list[_StepHook] = process_wide("hooks before steps", [])
_after_steps: list[_StepHook] = process_wide("hooks after steps", [])
_lock = threading.RLock()  # a model that is freed meanwhile ends its run
_handles: list[RemovableHandle] = process_wide("hooks of torch for those of steps", [])


class _Hook:
    """Calls functions at the steps of all optimizers. It is pickled as one that does nothing.

    torch goes through its own table of hooks while they run, and raises if it changes: as another thread begins a
    training, or a hook does. So torch has this one, from before the first function to after the last.

    torch puts a function around the ``step`` of a user's class. cloudpickle sends that with torch's table of
    hooks.
    """

    def __init__(self, functions: list[_StepHook]) -> None:
        self._functions = functions

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        for function in [*self._functions]:
            result = function(optimizer, args, kwargs)
            if result is not None:
                changed = args, kwargs = result
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class StepHook:
    """A function that is called at the steps of all optimizers of the process, until `remove`."""

    def __init__(self, functions: list[_StepHook], function: _StepHook) -> None:
        self._functions, self._function = functions, function
        with _lock:
            functions.append(function)
            if not _handles:
                _handles.append(register_optimizer_step_pre_hook(_Hook(_before_steps)))
                _handles.append(register_optimizer_step_post_hook(_Hook(_after_steps)))

    def remove(self) -> None:
        """Call the function no more."""
        with _lock:
            self._functions.remove(self._function)
            while _handles and not (_before_steps or _after_steps):
                _handles.pop().remove()


def hook_before_steps(function: _StepHook) -> StepHook:
    """Call a function before the steps of all optimizers of the process."""
    return StepHook(_before_steps, function)


def hook_after_steps(function: _StepHook) -> StepHook:
    """Call a function after the steps of all optimizers of the process."""
    return StepHook(_after_steps, function)


# --- layouts ---


def guard_layout(optimizer: Optimizer, undoing: ExitStack) -> None:
    """Keep the strides of gradients and state equal to those of the parameters, until `undoing` is closed.

    The optimizer is held weakly.

    State is converted immediately, after each ``load_state_dict``, and before a step if the layout of a parameter has
    changed. Gradients are converted before each fused step. ``state_dict()`` returns state in torch's default layout,
    so that a checkpoint is also safe in a plain run.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, whose state is changed. Several users share one guard.
    undoing : contextlib.ExitStack
        Removes the hooks when it is closed.
    """
    stack = undone_with(optimizer, undoing)
    stack.enter_context(shared_change(("guarded layout", id(optimizer)), lambda: _guarded(optimizer)))


@contextmanager
def _guarded(optimizer: Optimizer) -> Iterator[None]:
    guard = _Guard()
    relay_state(optimizer)
    with (
        optimizer.register_step_pre_hook(FusedStepCheck(guard.check)),
        optimizer.register_load_state_dict_post_hook(relay_state),
        optimizer.register_state_dict_post_hook(portable_state),
    ):
        del optimizer  # its hooks have it
        yield


class _Guard:
    """The check before each step of one optimizer."""

    def __init__(self) -> None:
        self._strides: dict[int, tuple[int, ...]] = {}  # of non-contiguous parameters at the last step

    def check(self, optimizer: Optimizer) -> None:
        moved = False
        for group in optimizer.param_groups:
            if group.get("fused"):
                for parameter in group["params"]:
                    gradient = gradient_of(parameter)
                    if gradient is None or gradient.layout is not torch.strided:
                        continue
                    # The common case: both are contiguous, and were before. This line is the overhead of a step.
                    if parameter.is_contiguous() and gradient.is_contiguous() and id(parameter) not in self._strides:
                        continue
                    moved |= self._match(parameter, gradient)
        if moved:
            relay_state(optimizer)

    def _match(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Convert the gradient to its parameter's layout. Return whether that layout changed since the last step."""
        stride = parameter.stride()
        if gradient.stride() != stride:
            parameter.grad = laid_out_as(parameter, gradient)
        before = self._strides.get(id(parameter))
        self._strides[id(parameter)] = stride
        return before != stride


def relay_state(optimizer: Optimizer) -> None:
    """Convert the tensors of the optimizer's state to the strides of their parameter, if they have its shape."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _is_misplaced(value, parameter):
                state[key] = laid_out_as(parameter, value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is non-overlapping and dense, so that another tensor can have the same strides."""
    if is_lazy(tensor):
        return True  # as it will be: it has no shape yet
    return tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def laid_out_as(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of `value` with the strides of `like` and the shape and dtype of `value`.

    If `like` is not dense, the strides only preserve its order of dimensions.
    """
    return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)


def portable_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `state_dict` in which every strided tensor of the state is contiguous."""
    state = {key: _contiguous(values) for key, values in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _contiguous(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        key: value.contiguous() if isinstance(value, torch.Tensor) and value.layout is torch.strided else value
        for key, value in values.items()
    }


def _is_misplaced(value: Any, parameter: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided is parameter.layout
        and value.shape == parameter.shape
        and value.stride() != parameter.stride()
    )
