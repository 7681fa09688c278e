"""How tensors, optimizers and loaders are pickled with what plain pickling loses, and the table of all reductions."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.distributed.payload.buffers import Reduction, reduce_array, reduce_typed_storage, reduced, typed_storages
from nano_loop.distributed.payload.code_reductions import (
    reduce_code,
    reduce_function,
    reduce_imported,
    reduce_module,
)
from nano_loop.patching.torch_private_autograd import TENSOR_HOOKS
from nano_loop.patching.torch_private_loaders import kept_iterator, with_iterator
from nano_loop.patching.torch_private_optimizers import is_watched_by_scheduler

# --- tensors, generators ---


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Add a leaf's gradient and hooks, which torch leaves behind."""
    kept = {name: hooks for name in TENSOR_HOOKS if tensor.is_leaf and (hooks := getattr(tensor, name))}
    make, arguments, *others = _reduced_silently(tensor) if kept else reduced(tensor)
    if tensor.is_leaf and tensor.grad is not None:
        kept["grad"] = tensor.grad
    plain = make, typed_storages(arguments), *others
    return (*plain, kept, None, None, _set_attributes) if kept and not others else plain


def _reduced_silently(tensor: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "backward hook .* on tensor will not be serialized")
        return reduced(tensor)


def _set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)


def _reduce_generator(generator: torch.Generator) -> Reduction | None:
    """Let torch's own generator arrive as the other process's own."""
    return (getattr, (torch, "default_generator")) if generator is torch.default_generator else None


# --- optimizers, loaders ---


def _reduce_optimizer(optimizer: Optimizer) -> Reduction | None:
    """Add hooks and other attributes, of which `Optimizer.__getstate__` keeps three."""
    if type(optimizer).__getstate__ is not Optimizer.__getstate__:
        return None
    state = dict(vars(optimizer))
    # A scheduler puts a `step` on the optimizer that notes the call for a warning, and that holds the optimizer weakly.
    if is_watched_by_scheduler(state.get("step")):
        del state["step"]
    return copyreg.__newobj__, (type(optimizer),), state  # type: ignore[attr-defined]


def _reduce_loader(loader: DataLoader[Any]) -> Reduction | None:
    """Leave the iterator out that a loader with persistent workers keeps; the next epoch makes a new one."""
    if kept_iterator(loader) is None:
        return None
    make, arguments, state, *others = reduced(loader)
    return make, arguments, with_iterator(state), *others


#: How instances of a class, and of those that inherit from it, are pickled; None from one of these leaves it to others.
REDUCTIONS: dict[type, Callable[[Any], Reduction | None]] = {
    torch.Tensor: _reduce_tensor,
    torch.TypedStorage: reduce_typed_storage,
    torch.Generator: _reduce_generator,
    nn.Module: reduce_module,
    Optimizer: _reduce_optimizer,
    DataLoader: _reduce_loader,
    np.ndarray: reduce_array,
    CodeType: reduce_code,
    FunctionType: reduce_function,
    ModuleType: reduce_imported,
}
