"""A cloudpickle pickler that preserves the state of torch and numpy objects."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Iterator, Mapping
from pickle import PickleBuffer
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.distributed.payload.code_reductions import (
    NamedObjects,
    in_main,
    reduce_code,
    reduce_function,
    reduce_imported,
    reduce_module,
)
from nano_loop.distributed.payload.shared_files import (
    Reduction,
    reduce_array,
    reduce_storage,
    reduce_typed_storage,
    reduced,
    typed_storages,
)
from nano_loop.patching.members import buffers_of
from nano_loop.patching.torch_private_autograd import TENSOR_HOOKS
from nano_loop.patching.torch_private_loaders import kept_iterator, with_iterator
from nano_loop.patching.torch_private_optimizers import is_watched_by_scheduler

# --- tensors, generators ---


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Add a leaf's gradient and hooks, which torch omits."""
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
    """Unpickle torch's default generator as the default generator of the other process."""
    return (getattr, (torch, "default_generator")) if generator is torch.default_generator else None


# --- optimizers, loaders ---


def _reduce_optimizer(optimizer: Optimizer) -> Reduction | None:
    """Add hooks and other attributes, because `Optimizer.__getstate__` only keeps three."""
    if type(optimizer).__getstate__ is not Optimizer.__getstate__:
        return None
    state = dict(vars(optimizer))
    # A scheduler sets a `step` on the optimizer that records calls for a warning and references the optimizer weakly.
    if is_watched_by_scheduler(state.get("step")):
        del state["step"]
    return copyreg.__newobj__, (type(optimizer),), state  # type: ignore[attr-defined]


def _reduce_loader(loader: DataLoader[Any]) -> Reduction | None:
    """Omit the iterator of a loader with persistent workers; the next epoch creates a new one."""
    if kept_iterator(loader) is None:
        return None
    make, arguments, state, *others = reduced(loader)
    return make, arguments, with_iterator(state), *others


#: Reductions for instances of a class and its subclasses. If one returns None, the default applies.
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


_PROTOCOL = 5


class FaithfulPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles with cloudpickle, and state that it loses, with storages and arrays as buffers, passed to `take`."""

    def __init__(self, file: Any, take: Callable[[PickleBuffer], bool]) -> None:
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=take)
        self.place_of = NamedObjects().place_of
        self._changing: dict[int, torch.UntypedStorage] = {}  # storages that training writes to, by id

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of `value`; `pickle` calls this for everything but numbers, strings and containers."""
        kind = type(value)  # isinstance would run a user's __class__ property
        for tensor in _about_to_change(kind, value):
            storage = tensor.untyped_storage()
            self._changing[id(storage)] = storage
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            return reduce_storage(value, id(value) in self._changing)
        if (place := self.place_of(value)) is not None:
            return getattr, place
        reduce = next((reduce for base, reduce in REDUCTIONS.items() if issubclass(kind, base)), lambda value: None)
        reduction = reduce(value) or super().reducer_override(value)
        if not isinstance(reduction, tuple) or not issubclass(kind, (type, FunctionType)):
            return reduction
        return in_main(value, reduction)


def _about_to_change(kind: type, value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a parameter, module or optimizer that training writes to, before they are pickled."""
    tensors: list[Any] = []
    if issubclass(kind, torch.Tensor) and (issubclass(kind, nn.Parameter) or value.requires_grad):
        tensors = [value, value.grad if value.is_leaf else None]
    elif issubclass(kind, nn.Module):
        tensors = list(buffers_of(value, recurse=False))
    elif issubclass(kind, Optimizer):
        tensors = [part for state in value.state.values() if isinstance(state, dict) for part in state.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not is_lazy(tensor):
            yield tensor
