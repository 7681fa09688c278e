"""A cloudpickle pickler under which what torch and numpy make arrives as it was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nano_loop.distributed.payload.buffers import reduce_storage
from nano_loop.distributed.payload.code_reductions import NamedObjects, in_main
from nano_loop.distributed.payload.reductions import REDUCTIONS
from nano_loop.patching.members import buffers_of

_PROTOCOL = 5


class FaithfulPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by cloudpickle, with what plain pickling loses, and with storages and arrays as buffers.

    Parameters
    ----------
    file : object with a ``write`` method
        Where the pickle goes.
    take : callable
        Is given each buffer as a `pickle.PickleBuffer`; true keeps it in the pickle.
    """

    def __init__(self, file: Any, take: Callable[[PickleBuffer], bool]) -> None:
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=take)
        self._named_objects = NamedObjects()
        self._changing: dict[int, torch.UntypedStorage] = {}  # storages that training writes, by their ids

    def place_of(self, value: Any) -> tuple[ModuleType, str] | None:
        """See `NamedObjects.place_of`."""
        return self._named_objects.place_of(value)

    def reducer_override(self, value: Any) -> Any:
        """Say how `value` is pickled; `pickle` calls this for all but numbers, strings and containers."""
        kind = type(value)  # isinstance would run a __class__ property of the user's
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
    """Yield the tensors of a parameter, a module or an optimizer that training writes, before they are met."""
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
