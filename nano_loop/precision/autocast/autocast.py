"""Autocast on the CPU, its handling of recurrent layers, and a context that disables it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nano_loop.patching.attributes import has_own
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.ownership import without_policy
from nano_loop.patching.torch_private import calls_only_forward
from nano_loop.patching.walk import find

#: The dtypes that autocast casts to.
LOW_DTYPES = (torch.bfloat16, torch.float16)


def cpu_autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which torch runs matrix products and convolutions in bfloat16 or float16 on the CPU.

    Autocast's cache of weights is disabled: it would return stale casts of weights that were changed, and on torch 2.8,
    with gradients enabled, casts without history that were made under `torch.no_grad`.
    """
    return torch.autocast("cpu", dtype, cache_enabled=False)


_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


@functools.cache
def can_train_lstms(dtype: torch.dtype) -> bool:
    """Return whether torch can train LSTMs on this CPU under autocast in a dtype.

    Autocast uses oneDNN for LSTMs on every CPU, but oneDNN has no bf16 LSTM without AVX-512.
    """
    # The user may have set another default dtype or device.
    shapes = (1, 1, 1), (4, 1), (4,)
    state, weight, bias = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        try:
            torch.lstm(state, (state, state), (weight, weight, bias, bias), True, 1, 0.0, False, False, False)
        except RuntimeError:
            return False
    return True


def around_recurrent_layer(layer: nn.Module) -> Call | None:
    """Return a wrapper around calls of a recurrent layer of torch, or None for other modules.

    It lets autocast keep its casts of weights, which the layer uses in each time step. If a call does not run code of
    the user, nothing changes a weight between two time steps.
    """
    return _with_weights_cast_once if type(layer) in _LAYERS else None


def _with_weights_cast_once(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if type(self) not in _LAYERS or not calls_only_forward(self) or not has_own(type(self), "forward"):
        return function(self, *args, **kwargs)
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        return function(self, *args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run the body in fp32, including products and operations on bf16 and fp16 tensors from outside.

    Use it inside a model around operations that need the range or the precision of fp32, or around a whole call of a
    model. It is also a decorator: ``@disable_casts()``.

    Examples
    --------
    >>> import torch, nano_loop
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     hidden = torch.nn.Linear(4, 4)(torch.ones(2, 4))
    ...     with nano_loop.disable_casts():
    ...         variance = hidden.var()
    >>> hidden.dtype, variance.dtype
    (torch.bfloat16, torch.float32)
    """
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    rounding = nullcontext() if torch.compiler.is_compiling() else without_policy()
    # Autocast to fp32 casts mixed inputs of an operator. With autocast disabled, mixing bf16 with fp32 would raise.
    torch.set_autocast_dtype("cpu", torch.float32)
    torch.set_autocast_enabled("cpu", True)
    try:
        with rounding, _Upcast():
            yield
    finally:
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)


class _Upcast(TorchFunctionMode):
    """Passes fp32 copies of bf16 and fp16 arguments to every torch function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, out = getattr(func, "__name__", ""), kwargs.get("out")
        written = out if out is not None else args[0] if args and name.endswith("_") else None
        kept = {id(tensor) for tensor in find(Tensor, written)}
        # `__get__` and `__setitem__` read and write attributes and elements of any dtype.
        if name.startswith("__") or any(tensor.dtype in LOW_DTYPES for tensor in find(Tensor, written)):
            return func(*args, **kwargs)
        args, kwargs = map_tensors(lambda tensor: tensor if id(tensor) in kept else to_fp32(tensor), (args, kwargs))
        return func(*args, **kwargs)


def to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a bf16 or fp16 tensor to fp32, as part of the autograd graph. Return other tensors unchanged."""
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor
