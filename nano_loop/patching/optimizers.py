"""Utilities for optimizers: closures, the parameters that a step trains, memory layouts, and wrappers of optimizers.

A wrapper, such as Lookahead and Accelerate's ``AcceleratedOptimizer``, is an `Optimizer` that stores another one in an
attribute and calls its ``step``. Many wrappers do not call ``Optimizer.__init__``, so they have no hooks. The inner
optimizer has the kernels, the learning rate and the hooks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nano_loop.errors import NanoWarning, error_message
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private_optimizers import has_hooks
from nano_loop.patching.walk import find, walk

# --- closures ---

Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure argument of a step, or None. `args[0]` is the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether this optimizer's step requires a closure, as LBFGS does to compare losses at several points."""
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


def around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], before: Callable[[], None], after: Callable[[], None]
) -> Any:
    """Call functions before and after each call of a step's closure: return new arguments for it.

    Without a closure, call only `after`, now, and return None.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        after()
        return None

    def call() -> Any:
        before()
        loss = closure()
        after()
        return loss

    return with_closure(args, kwargs, call)


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that a step would train now: those with a gradient and a nonzero learning rate.

    `torch.distributed.checkpoint` initializes an optimizer's state by a step with gradients and learning rates of 0.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") is None or group["lr"]]
    return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]


# --- hooks of all optimizers ---


_StepHook = Callable[[Optimizer, Any, Any], Any]


def called_in_turn(functions: Iterable[_StepHook], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Call functions with the arguments of a step, which each may replace. Return the new arguments, or None."""
    changed = None
    for function in functions:
        result = function(optimizer, args, kwargs)
        if result is not None:
            changed = args, kwargs = result
    return changed


class _Hook:
    """Calls functions before or after the steps of all optimizers. It is pickled as a hook that does nothing.

    torch iterates over its table of global hooks while they run, and raises if the table changes, as when another
    thread or a hook starts training. So this one hook stays registered as long as there is any function.

    torch wraps the ``step`` of a user's class. cloudpickle pickles the wrapper with torch's table of hooks.
    """

    def __init__(self) -> None:
        self.functions: list[_StepHook] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return called_in_turn([*self.functions], optimizer, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


@contextmanager
def _hooked(register: Callable[[_Hook], RemovableHandle]) -> Iterator[list[_StepHook]]:
    hook = _Hook()
    handle = register(hook)
    try:
        yield hook.functions
    finally:
        handle.remove()


def called_before_steps(function: _StepHook) -> AbstractContextManager[None]:
    """Return a context in which a function is called before each step of any optimizer in the process."""
    register: Any = register_optimizer_step_pre_hook
    return listening("before steps", function, partial(_hooked, register))


def called_after_steps(function: _StepHook) -> AbstractContextManager[None]:
    """Return a context in which a function is called after each step of any optimizer in the process."""
    register: Any = register_optimizer_step_post_hook
    return listening("after steps", function, partial(_hooked, register))


def is_in_step(frame: FrameType | None) -> bool:
    """Whether a frame belongs to the step of an optimizer, and not to its closure, which enables gradients."""
    while frame is not None and not torch.is_grad_enabled():
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


# --- layouts ---


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is non-overlapping and dense, so that another tensor can have the same strides."""
    if is_lazy(tensor):
        return True  # a lazy parameter has no shape yet, but will be dense
    return tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def lies_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, and the same strides in all dimensions longer than 1."""
    if tensor.layout is not torch.strided or tensor.shape != other.shape:
        return False
    if tensor.stride() == other.stride():
        return True
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or stride == of_other for size, stride, of_other in strides)


def laid_out_as(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of `value`, with its shape and dtype, and the strides, or if not dense the order, of `like`."""
    return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)


# --- wrappers ---


def innermost(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Replace wrappers by the optimizers inside them, without duplicates; warn about those that have no hooks."""
    innermost = [optimizer for optimizer in walk(optimizers, _wrapped) if not _wrapped(optimizer)]
    for optimizer in innermost:
        if not has_hooks(optimizer):
            got = f"{type(optimizer).__name__} is not accelerated"
            expected = "it has no hooks, because its __init__ does not call Optimizer.__init__"
            message = error_message(got, expected, "Call super().__init__(params, defaults) there")
            warnings.warn(message, NanoWarning, stacklevel=2)
    return list(filter(has_hooks, innermost))


def _wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in attributes of `optimizer` that together hold all of its parameters."""
    if type(optimizer).step.__module__.partition(".")[0] == "torch":
        return []
    held = _parameters(optimizer)
    inner = [candidate for candidate in find(Optimizer, vars(optimizer)) if _parameters(candidate) <= held]
    covered: set[int] = set().union(*map(_parameters, inner))
    return inner if covered == held or not has_hooks(optimizer) else []


def _parameters(optimizer: Optimizer) -> set[int]:
    groups: Any = getattr(optimizer, "param_groups", ())  # may be missing without `Optimizer.__init__`
    return {id(parameter) for group in groups for parameter in group["params"]}
