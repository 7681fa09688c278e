"""The tensors that a model computes in a step: accelerated, by hand in a precision, or in fp64."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy

from nano_loop.config.precisions import PrecisionKind
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.kernels.memory import NHWC
from nano_loop.patching.calls.calls import Call, CallInterceptors
from nano_loop.patching.members import forget_gradients, named_parameters_of, parameters_of
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.walk import find
from nano_loop.precision.autocast.autocast import can_train_lstms, cpu_autocast, disable_casts

_DROPOUTS = ("dropout", "dropout_p", "dropout_prob", "drop_prob")


@dataclass(frozen=True)
class Trace:
    """The module outputs in the order of the calls, the gradients from the last layer to the first, and the loss."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: dict[str, Tensor]


def backward_into(model: nn.Module, loss: Tensor) -> None:
    """Accumulate the gradients of a loss only in the parameters of a copy, not in others that the copy uses."""
    leaves = [parameter for parameter in parameters_of(model) if parameter.requires_grad]
    if leaves:
        torch.autograd.backward(loss, inputs=leaves)


def traced(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> Trace:
    """Run `call`, which computes a loss and its backward with a model, and return its tensors in fp64."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [tensor for tensor in find(Tensor, output) if tensor.is_floating_point()]
        if id(module) in names and tensors:
            name, calls = names[id(module)], 1
            while name in outputs:
                calls += 1
                name = f"{names[id(module)]} (call {calls})"
            outputs[name] = torch.cat([tensor.detach().double().flatten() for tensor in tensors])

    # One global hook: layers with hooks would run without some accelerations.
    handle = register_module_forward_hook(note)
    try:
        loss = call(model)
    finally:
        handle.remove()
    held = {name: parameter.grad for name, parameter in named_parameters_of(model) if parameter.grad is not None}
    gradients = {name: gradient.detach().to_dense().double() for name, gradient in reversed(held.items())}
    return Trace(outputs, gradients, {"loss": loss.detach().double()})


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients and dropout; raise a `NanoConfigError` if it cannot be copied."""
    try:
        duplicate = copy.deepcopy(model)
    except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError) as error:
        got = f"{type(model).__name__} cannot be copied: {error}"
        raise NanoConfigError(
            error_message(got, "verify computes on copies", "Make it work with copy.deepcopy")
        ) from error
    forget_gradients(duplicate)
    for module in duplicate.modules():
        is_dropout = "dropout" in type(module).__name__.lower()
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and (name.endswith(_DROPOUTS) or (is_dropout and name == "p")):
                setattr(module, name, 0.0)
    return duplicate


@contextmanager
def by_hand(model: nn.Module, kind: PrecisionKind, *, channels_last: bool = False) -> Iterator[nn.Module]:
    """Run the calls into a copy as in plain torch code for a precision and a layout, with outputs in fp32."""
    dtype, autocast = kind.parameters or torch.float32, kind.autocast_by_hand

    def laid_out(tensor: Tensor) -> Tensor:
        is_image = channels_last and tensor.layout is torch.strided and tensor.dim() in NHWC
        return tensor.contiguous(memory_format=NHWC[tensor.dim()]) if is_image else tensor

    def inward(tensor: Tensor) -> Tensor:
        is_cast = kind.parameters is not None and tensor.is_floating_point()
        return laid_out(tensor.to(dtype) if is_cast else tensor)

    def outward(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor

    def layer(call: Call) -> Call:
        def in_precision(function: Call, /, *args: Any, **kwargs: Any) -> Any:
            if kind.parameters is not None or channels_last:
                args, kwargs = map_tensors(inward, (args, kwargs))
            with nullcontext() if autocast is None else cpu_autocast(autocast):
                return map_tensors(outward, call(function, *args, **kwargs))

        return in_precision

    interceptors = CallInterceptors()
    interceptors.add(converted(model, dtype), "by hand", layer).is_plain = True
    for parameter in parameters_of(model):
        if not is_lazy(parameter):
            parameter.data = laid_out(parameter.data)
    for module in model.modules() if autocast is not None and not can_train_lstms(autocast) else ():
        if isinstance(module, nn.LSTM):
            module.forward = disable_casts()(module.forward)  # type: ignore[method-assign]
    try:
        yield model
    finally:
        interceptors.close()


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a copied model to a dtype, without its own `to`, which may be a closure over the user's model."""
    return nn.Module.to(model, dtype)


@contextmanager
def tensors_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore tensors and their gradients on exit: a copy may share a module, or a hook's closure, with it."""
    gradients = [(tensor, tensor.grad) for tensor in {id(one): one for one in tensors}.values()]
    values = [(tensor, tensor.detach().clone()) for tensor, _ in gradients if not is_lazy(tensor)]
    try:
        for tensor, _ in gradients:
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for tensor, value in values:
            if tensor.layout is torch.strided and not torch.equal(tensor, value):
                tensor.detach().copy_(value)


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[nn.Module]:
    """Convert a model to fp64, and make it create new tensors in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield converted(model, torch.float64)
    finally:
        torch.set_default_dtype(before)


@contextmanager
def random_states_kept() -> Iterator[Callable[[], None]]:
    """Restore the states of Python's, numpy's and torch's random generators on exit, and by calling the value."""
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

    try:
        yield restore
    finally:
        restore()
