"""Calls the fused kernels of optimizers without what torch does around them in each ``step()`` and ``zero_grad()``.

torch labels each call for its profiler, breaks graphs that nobody compiles, and sorts the tensors by device and dtype.
For a small model that is a tenth of a training step. Here the same hooks run, and the same kernel on the same tensors.
What is unusual is left to torch: a first step, a closure, a mixture of dtypes, a profiler that runs, `torch.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from nano_loop.errors import error_message
from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import listed, process_wide, shared_change
from nano_loop.patching.torch_private_optimizers import (
    foreach_increment,
    fused_adam,
    fused_sgd,
    hooks_after_step,
    hooks_before_step,
    is_profiling,
    unhooked_step,
)

_Method = Callable[..., Any]

#: Calls a kernel with what was gathered for a group.
_Kernel = Callable[[], None]

#: The ids of the optimizers whose steps are direct.
_direct: set[int] = process_wide("optimizers that step directly", set())

#: Not empty while somebody needs torch's labels.
_labelled: set[str] = process_wide("observers of torch's labels", set())


@contextmanager
def stepped_directly(optimizer: Optimizer) -> Iterator[None]:
    """Call the kernels of this optimizer directly, where it is exactly an Adam, an AdamW or an SGD.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        It keeps its class and its attributes; two methods of the class are replaced. Groups without ``fused=True`` are
        stepped by torch. The context does not hold it, and is to be left when it is freed.
    """
    kind, number = type(optimizer), id(optimizer)
    del optimizer
    with ExitStack() as changes:
        if kind in _GATHER and unhooked_step(kind.step) is not None:
            changes.enter_context(replaced(kind, "step", _step))
            changes.enter_context(replaced(kind, "zero_grad", _zero_grad))
            changes.enter_context(shared_change(("direct steps", number), lambda: listed(_direct, number)))
        yield


def steps_labelled() -> AbstractContextManager[None]:
    """Leave every step to torch, which labels it, for an observer that is no profiler of torch."""
    return shared_change("labelled steps", lambda: listed(_labelled, "steps"))


def _is_left_to_torch(optimizer: Optimizer) -> bool:
    return torch.compiler.is_compiling() or id(optimizer) not in _direct or bool(_labelled) or is_profiling()


def _step(original: _Method) -> _Method:
    """Return the replacement of ``step``, which torch has wrapped in what runs the hooks."""
    body = unhooked_step(original)
    assert body is not None

    @functools.wraps(original)  # with torch's mark, or it would wrap the replacement when an optimizer is built
    def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or _is_left_to_torch(self):
            return original(self, *args, **kwargs)
        arguments: tuple[Any, ...] = (self,)
        for hook in hooks_before_step(self):
            changed = hook(self, arguments, kwargs)
            if changed is not None:
                arguments, kwargs = _of_hook(changed)
        result = None
        if len(arguments) > 1 or kwargs or not _called_directly(self):
            result = body(*arguments, **kwargs)
        for hook in hooks_after_step(self):
            hook(self, arguments, kwargs)
        return result

    return step


def _of_hook(changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a hook before the step has changed. torch raises the same kind of error."""
    if not isinstance(changed, tuple) or len(changed) != 2:
        got = f"A hook before optimizer.step() returned {changed!r}"
        raise RuntimeError(
            error_message(got, "None, or the new arguments and keyword arguments", "Return one of these")
        )
    return changed


def _zero_grad(original: _Method) -> _Method:
    """Return the replacement of ``zero_grad``."""

    @functools.wraps(original)
    def zero_grad(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or _is_left_to_torch(self):
            return original(self, *args, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return None

    return zero_grad


def _called_directly(optimizer: Optimizer) -> bool:
    """Step every group, or return False and change nothing."""
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False
    gather = _GATHER[type(optimizer)]
    kernels: list[_Kernel] = []
    for group in optimizer.param_groups:
        if not group["fused"] or group["differentiable"] or not isinstance(group["lr"], (int, float)):
            return False
        kernel = gather(optimizer, group)
        if kernel is None:
            return False
        kernels.append(kernel)
    with torch.no_grad():
        for kernel in kernels:
            kernel()
    return True


def _gather_adam(optimizer: Optimizer, group: dict[str, Any]) -> _Kernel | None:
    """Return what steps a group of Adam or AdamW, or None where torch has to do it."""
    beta1, beta2 = group["betas"]
    if group["amsgrad"] or group["capturable"] or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return None
    parameters, gradients, means, squares, steps = [], [], [], [], []
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is not None:
            state = optimizer.state.get(parameter)
            if not state:
                return None
            parameters.append(parameter)
            gradients.append(gradient)
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
    if not parameters:
        return _nothing
    if not _are_alike(parameters, gradients, means, squares):
        return None

    def kernel() -> None:
        foreach_increment(steps)
        fused_adam(
            parameters,
            gradients,
            means,
            squares,
            steps,
            is_decoupled=group["decoupled_weight_decay"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    return kernel


def _gather_sgd(optimizer: Optimizer, group: dict[str, Any]) -> _Kernel | None:
    """Return what steps a group of SGD, or None where torch has to do it."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not parameters:
        return _nothing
    gradients = [parameter.grad for parameter in parameters]
    momenta = []
    if group["momentum"]:
        momenta = [optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in parameters]
    if any(momentum is None for momentum in momenta) or not _are_alike(parameters, gradients, momenta):
        return None

    def kernel() -> None:
        fused_sgd(
            parameters,
            gradients,
            momenta,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )

    return kernel


def _nothing() -> None:
    """Step a group without gradients."""


def _are_alike(*lists: list[Tensor]) -> bool:
    """Whether all tensors are strided ones on the CPU of one dtype that is real: torch sorts them by these."""
    dtype = lists[0][0].dtype
    if not dtype.is_floating_point:
        return False
    for tensors in lists:
        for tensor in tensors:
            if tensor.dtype is not dtype or not tensor.is_cpu or tensor.layout is not torch.strided:
                return False
    return True


_GATHER: dict[type, Callable[[Optimizer, dict[str, Any]], _Kernel | None]] = {
    Adam: _gather_adam,
    AdamW: _gather_adam,
    SGD: _gather_sgd,
}
