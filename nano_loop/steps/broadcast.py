"""Broadcasts the values of rank 0 to every rank before training starts."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from nano_loop.distributed.data_parallel.initial_sync import make_equal, named_buffers, named_parameters
from nano_loop.distributed.sharding.dataset_digest import Digest
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import buffers_of, parameters_of
from nano_loop.patching.optimizers import held_by
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import RanksStep


class Broadcast(RanksStep):
    """Overwrites parameters, buffers and optimizer state in place with the values of rank 0, once per run."""

    name = "broadcast"
    needs = "trained"  # an optimizer may be set up without a model, with separate parameters

    @override
    def begin(self) -> None:
        self._done: Any = WeakIdKeyDictionary()  # tensors by module or optimizer: swaps refuse weak references

    @override
    def apply(self, parts: TrainingObjects) -> str:
        modules = [module for model in parts.models for module in model.modules()]
        known = [tensor for tensors in self._done.values() for tensor in tensors]
        known += [buffer for module in modules if module in self._done for buffer in buffers_of(module, recurse=False)]
        done = set(map(id, known))  # calls may have resized buffers, such as caches, on each rank
        named = [*named_parameters(parts.models, parts.optimizers), *named_buffers(parts.models)]
        new = [(name, tensor) for name, tensor in named if id(tensor) not in done]
        optimizers = [optimizer for optimizer in parts.optimizers if optimizer not in self._done]
        groups = [
            f"{type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"
            for optimizer in optimizers
        ]
        make_equal(self.ranks, new, groups)
        for optimizer in optimizers:
            self._broadcast_state(optimizer)
        for optimizer in parts.optimizers:
            self._done[optimizer] = held_by(optimizer)
        for module in modules:
            self._done[module] = [*parameters_of(module, recurse=False), *buffers_of(module, recurse=False)]
        return "every rank starts with rank 0's values"

    def _broadcast_state(self, optimizer: Optimizer) -> None:
        """Broadcast the optimizer's state if the ranks differ, as when only one rank loaded a checkpoint."""
        held = held_by(optimizer)
        states = [optimizer.state.get(parameter) for parameter in held]
        checksums = tuple(Digest(state, elements=sys.maxsize).crc for state in states)
        if len(set(self.ranks.gather(checksums))) == 1:
            return
        for parameter, state in zip(held, self.ranks.broadcast(states), strict=True):
            optimizer.state.pop(parameter, None)
            if state is not None:
                optimizer.state[parameter] = state
