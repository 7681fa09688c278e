"""Temporary conversion of parameters, buffers and optimizer state to another dtype, in place."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with
from nano_loop.patching.members import buffers_of, parameters_of, shaped
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.optimizers import held_by
from nano_loop.patching.torch_private import users_of_storage

_TRIMMED = 16 << 20  # bytes that are converted before freed memory is returned


class Conversion:
    """The tensors, weakly referenced, that were converted to a dtype, with their original state.

    `to_fp32` converts a tensor of this dtype, which is cast by default. `trim` returns freed memory, several times at
    the end.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        to_fp32: Callable[[Tensor], Tensor] | None = None,
        trim: Callable[[], None] | None = None,
    ) -> None:
        self.dtype = dtype
        self._to_fp32, self._trim = to_fp32, trim
        self._models: Any = WeakIdKeyDictionary()
        self._optimizers: Any = WeakIdKeyDictionary()
        # The dtype of each tensor, and its memory if that is shared. Keyed by id until the model is freed, since
        # `torch.utils.swap_tensors` refuses tensors with weak references.
        self._before: dict[int, tuple[Tensor, torch.dtype, Tensor | None]] = {}
        self._ending = ExitStack()

    def convert(self, model: nn.Module, to_dtype: Callable[[Tensor], Tensor] | None = None) -> None:
        """Convert the floating-point parameters of a model, their gradients, and its buffers, in place."""
        self._models[model] = True
        new = [tensor for tensor in _floating(model) if id(tensor) not in self._before]
        own = Counter(map(_address, new))
        forgetting = undone_with(model, self._ending)
        for tensor in new:
            has_aliases = _address(tensor) and users_of_storage(tensor) > own[_address(tensor)]
            memory = tensor.data if has_aliases and not tensor.is_inference() else None
            self._before[id(tensor)] = tensor, tensor.dtype, memory
            forgetting.callback(self._before.pop, id(tensor), None)
        cast(new, self.dtype, to_dtype)

    def is_alias(self, tensor: Tensor) -> bool:
        """Whether a tensor shares the memory that a converted tensor had before, and is not converted itself."""
        before = (memory for _, _, memory in self._before.values() if memory is not None)
        return id(tensor) not in self._before and _address(tensor) in map(_address, before)

    def convert_added(self, module: nn.Module) -> None:
        """Convert the tensors that the loop has added to a module, in place."""
        added = [tensor for tensor in _floating(module) if tensor.dtype is not self.dtype and tensor.is_leaf]
        cast(added, self.dtype)

    def convert_state(self, optimizer: Optimizer) -> None:
        """Convert the fp32 state of an optimizer, except scalars such as step counters."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = True
            _cast_state(optimizer, torch.float32, lambda parameter: self.dtype)

    def note_state(self, optimizer: Optimizer) -> None:
        """Convert the state of an optimizer back later if it trains the models."""
        if optimizer in self._optimizers:
            return
        trained = set(map(id, held_by(optimizer)))
        if any(id(tensor) in trained for model in [*self._models] for tensor in parameters_of(model)):
            self._optimizers[optimizer] = True

    @torch.inference_mode(False)
    def restore(self) -> None:
        """Convert all tensors of this dtype back. Tensors that the loop has added become fp32."""
        present = itertools.chain.from_iterable(map(_floating, [*self._models]))
        by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
        for tensor in [*(tensor for tensor, *_ in self._before.values()), *present]:
            if tensor.dtype is self.dtype:
                _, dtype, _ = self._before.get(id(tensor), (tensor, torch.float32, None))
                by_dtype.setdefault(dtype, {})[id(tensor)] = tensor
        for dtype, tensors in by_dtype.items():
            cast([*tensors.values()], dtype, None if dtype is self.dtype else self._to_fp32, self._trim)
        for tensor, dtype, memory in self._before.values():
            if memory is not None and (tensor.dtype, tensor.shape) == (dtype, memory.shape):
                memory.copy_(tensor.data)  # visible to the program or another process through another tensor
                tensor.data = memory
        for optimizer in [*self._optimizers]:
            _cast_state(optimizer, self.dtype, _dtype_of_state)
        self._ending.close()
        for collection in (self._models, self._optimizers):
            collection.clear()


@torch.inference_mode(False)
def _cast_state(optimizer: Optimizer, before: torch.dtype, after: Callable[[Any], torch.dtype]) -> None:
    """Cast the state of each parameter with one dtype to another, which is that for the parameter."""
    everything: dict[Any, Any] = dict(optimizer.state)  # a user's optimizer may store anything in it
    for parameter, state in everything.items():
        if isinstance(state, dict):
            dtype = after(parameter)
            state.update(map_tensors(partial(_cast_from, before, dtype), state))


def _cast_from(before: torch.dtype, after: torch.dtype, value: Tensor) -> Tensor:
    return value.to(after) if value.dtype is before and value.dim() else value


def _dtype_of_state(parameter: Any) -> torch.dtype:
    """Return the dtype of a parameter, which may be the run's before it and after it, or else fp32."""
    is_floating = isinstance(parameter, Tensor) and parameter.is_floating_point()
    return parameter.dtype if is_floating else torch.float32


@torch.inference_mode(False)  # tensors created in a caller's inference mode cannot be trained later
def cast(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    convert: Callable[[Tensor], Tensor] | None = None,
    trim: Callable[[], None] | None = None,
) -> None:
    """Cast tensors and their gradients in place as ``module.to(dtype)`` does, or by `convert`."""
    converted = 0  # bytes since memory was returned

    def to_dtype(data: Tensor) -> Tensor:
        converted = (data if convert is None else convert(data)).to(dtype)
        if data.untyped_storage().is_shared():
            converted.untyped_storage().share_memory_()
        return converted

    for tensor, data in _converted(tensors, to_dtype):
        gradient, tensor.grad = tensor.grad, None
        tensor.data = data
        tensor.grad = None if gradient is None else gradient.to(dtype)
        del gradient  # before the next tensor is converted
        converted += data.numel() * data.element_size()
        if trim is not None and converted >= _TRIMMED:
            trim()
            converted = 0


def convert_data(tensors: Sequence[Tensor], convert: Callable[[Tensor], Tensor]) -> None:
    """Convert the data of tensors in place. Tensors that share memory still share it afterwards."""
    for tensor, data in _converted(tensors, convert):
        tensor.data = data


def _converted(tensors: Sequence[Tensor], convert: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor and its new data, which the caller assigns before the next one is converted."""
    shared = Counter(map(_address, tensors))
    storages: dict[tuple[int, torch.dtype], Tensor] = {}  # converted storages by address
    for tensor in tensors:
        key = address, _ = _address(tensor), tensor.dtype
        if not address or shared[address] == 1:
            yield tensor, convert(tensor.data)
            continue
        if key not in storages:
            size = tensor.untyped_storage().nbytes() // tensor.itemsize
            storages[key] = convert(tensor.data.as_strided((size,), (1,), 0))
        yield tensor, storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


def _floating(model: nn.Module) -> list[Tensor]:
    tensors = shaped(itertools.chain(parameters_of(model), buffers_of(model)))
    return [tensor for tensor in tensors if tensor.is_floating_point()]
