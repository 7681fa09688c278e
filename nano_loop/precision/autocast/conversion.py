"""Parameters, buffers and optimizer state in another dtype for a while, as the same objects."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.patching.nested_tensors import map_tensors


class Conversion:
    """The tensors that were converted to one dtype, with what they were before.

    Parameters
    ----------
    dtype : torch.dtype
        What they are converted to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._before: dict[int, tuple[Tensor, torch.dtype]] = {}

    def convert(self, model: nn.Module) -> None:
        """Convert the floating-point parameters of a model, their gradients, and its buffers, in place."""
        self._models.append(model)
        for tensor in _floating(model):
            if id(tensor) not in self._before:
                self._before[id(tensor)] = tensor, tensor.dtype
                cast(tensor, self.dtype)

    def convert_state(self, optimizer: Optimizer) -> None:
        """Convert the fp32 state of an optimizer, but for single numbers, such as counters of steps."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            _cast_state(optimizer, torch.float32, self.dtype)

    def restore(self) -> None:
        """Convert all that has this dtype back: what the loop has added to the models, to fp32."""
        present = itertools.chain.from_iterable(map(_floating, self._models))
        for tensor in [*(tensor for tensor, _ in self._before.values()), *present]:
            if tensor.dtype is self.dtype:
                cast(tensor, self._before.get(id(tensor), (tensor, torch.float32))[1])
        for optimizer in self._optimizers:
            _cast_state(optimizer, self.dtype, torch.float32)
        for each in (self._models, self._optimizers, self._before):
            each.clear()


def _cast_state(optimizer: Optimizer, before: torch.dtype, after: torch.dtype) -> None:
    def converted(value: Tensor) -> Tensor:
        return value.to(after) if value.dtype is before and value.dim() else value

    everything: dict[Any, Any] = dict(optimizer.state)  # in which an optimizer of the user's may keep anything
    for state in everything.values():
        if isinstance(state, dict):
            state.update(map_tensors(converted, state))


def cast(tensor: Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter or buffer and its gradient, in place, as ``module.to(dtype)`` does."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if gradient is None else gradient.to(dtype)


def _floating(model: nn.Module) -> list[Tensor]:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return [tensor for tensor in tensors if tensor.is_floating_point()]
