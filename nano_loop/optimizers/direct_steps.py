"""Calls kernels of optimizers without torch's overhead in each ``step()``.

torch labels each call for its profiler, adds graph breaks even without a compiler, and sorts tensors by device and
dtype. For a small model, this takes a tenth of a training step. Here, the same hooks run, and the same kernel with the
same tensors. torch handles unusual calls: first steps, closures, mixed dtypes, a running profiler, `torch.compile`, and
any function of torch that the program has replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from nano_loop.kernels import denormals
from nano_loop.kernels.embedding import row_gradients
from nano_loop.optimizers import row_steps
from nano_loop.optimizers.row_steps import RowStep
from nano_loop.optimizers.torch_fused_steps import (
    are_counters,
    has_own_steps,
    is_fused,
    is_torchs,
    lie_alike,
    lie_in_order,
    steps_as_torch,
    steps_fused,
    takes_kernel,
)
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private_optimizers import (
    foreach_increment,
    hooks_after_step,
    hooks_before_step,
    is_profiling,
    preparing,
    unhooked_step,
)

_Method = Callable[..., Any]
_Group = dict[str, Any]

#: The smallest eps that hides the root of a denormal moment: it changes no bit of the divisor.
LEAST_EPS = 1e-11


@contextmanager
def stepped_directly(optimizer: Optimizer) -> Iterator[None]:
    """Step this optimizer by fused kernels, called directly if its class is exactly one with such kernels.

    The method is replaced in the class that defines it. Exit the context when the optimizer is freed.
    """
    kind, fused = type(optimizer), steps_fused(optimizer)
    del optimizer
    owner = next(base for base in kind.__mro__ if "step" in vars(base))
    with fused, replaced(owner, "step", _step) if kind in _RULES else nullcontext():
        yield


def _step(original: _Method) -> _Method:
    """Return the replacement of torch's ``step``, or `original` if anything but torch's hooks wraps it."""
    body = unhooked_step(original)
    if body is None:
        return original

    @functools.wraps(original)  # keeps torch's mark, without which building an optimizer would wrap the replacement
    def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        is_direct = is_fused(self) and not has_own_steps(self)
        is_direct = is_direct and type(self) in _RULES  # a program may change its class
        if args or kwargs or not is_direct or torch.compiler.is_compiling() or is_profiling():
            return original(self, *args, **kwargs)
        arguments: tuple[Any, ...] = (self,)
        for hook in hooks_before_step(self):
            changed = hook(self, arguments, kwargs)
            if changed is not None:
                arguments, kwargs = changed
        result = None
        if len(arguments) > 1 or kwargs or not _called_directly(self):
            result = body(*arguments, **kwargs)
        for hook in hooks_after_step(self):
            hook(self, arguments, kwargs)
        return result

    return step


def _called_directly(optimizer: Optimizer) -> bool:
    """Step every group, or return False and change nothing."""
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False
    if not (steps_as_torch(type(optimizer)) and is_torchs(preparing(optimizer))):
        return False
    kernels: list[Callable[[], None]] = []
    flushes = True
    for group in optimizer.param_groups:
        kernel = _gathered(optimizer, group)
        if kernel is None:
            return False
        kernels.append(kernel)
        flushes = flushes and group.get("eps", 1.0) >= LEAST_EPS
    with torch.no_grad():
        threads = denormals.count_of_threads() if flushes else 0
        try:
            denormals.flush(threads)
            for kernel in kernels:
                kernel()
        finally:
            denormals.restore(threads)
    return True


def _gathered(optimizer: Optimizer, group: _Group) -> Callable[[], None] | None:
    """Return a function that steps a group by one of torch's fused kernels, or None if torch must do it."""
    if not takes_kernel(group) or group.get("amsgrad"):
        return None
    rule = _RULES[type(optimizer)]
    settings = {name: group[name] for name in rule.settings}
    with_gradient = [(parameter, gradient) for parameter in group["params"] if (gradient := parameter.grad) is not None]
    parameters = [parameter for parameter, _ in with_gradient]
    names = rule.states(settings)
    states = [optimizer.state.get(parameter, {}) for parameter in parameters] if names or rule.has_counter else []
    try:
        columns = [[state[name] for state in states] for name in names]
        counters = [[state["step"] for state in states]] if rule.has_counter else []
    except KeyError:
        return None  # this is the first step
    if not all(map(are_counters, counters)):
        return None
    lists: list[list[Any]] = [parameters, [gradient for _, gradient in with_gradient], *columns]
    is_usual = not parameters or lie_in_order(lists)
    if not is_usual and (len({parameter.dtype for parameter in parameters}) > 1 or not lie_alike(lists)):
        return None  # torch sorts by dtype, and uses a loop
    # torch's fused kernels change no versions. If the program has asked for one, this stays so.
    written = [] if group["fused"] else [*parameters, *chain(*columns)]
    lists += counters
    by_rows: list[RowStep] = []
    if row_gradients:
        steps = [row_steps.row_step(rule, tensors, settings) for tensors in zip(*lists, strict=True)]
        by_rows = [step for step in steps if step is not None]
        lists = [[tensor for tensor, step in zip(tensors, steps, strict=True) if step is None] for tensors in lists]

    def kernel() -> None:
        counters = [*lists[-1]] if rule.has_counter else []
        counters += [step.counter for step in by_rows if step.counter is not None]
        if counters:
            foreach_increment(counters)
        if lists[0]:
            rule.by_torch(*lists, **settings)
        for step in by_rows:
            step()
        increment_version(written)

    return kernel


_RULES = {Adam: row_steps.ADAM, AdamW: row_steps.ADAM, SGD: row_steps.SGD, Adagrad: row_steps.ADAGRAD}
