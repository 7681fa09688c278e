"""The parameters to average: the current ones of the models and optimizers that were set up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import starmap
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nano_loop.distributed.data_parallel.gradients import NOTHING, kind_of
from nano_loop.distributed.data_parallel.initial_sync import Named, named_buffers, named_parameters
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import buffers_of
from nano_loop.patching.torch_private import as_plain_tensors
from nano_loop.patching.torch_private_autograd import forget_empty_hooks, has_accumulation_hook


class Parameters:
    """The parameters of some models and optimizers, in an order that is the same on every rank.

    Each has a hook, also if frozen, that calls `arrived` inside the backward. Models and optimizers are kept until
    `forget_dropped`, so that all ranks average the same ones, independently of garbage collection.
    """

    def __init__(self, arrived: Callable[[torch.Tensor], None]) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.in_order: list[torch.Tensor] = []  # the parameters that may get gradients
        self._arrived = arrived
        #: Parameters, and buffers of modules, that the loop has added and that may differ between ranks.
        self.added_parameters: list[Named] = []
        # Keyed by parameter id: `torch.utils.swap_tensors` rejects tensors with weak references.
        self._watched: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}  # with their hooks
        self._equal: dict[int, torch.Tensor] = {}  # tensors whose values are equal on all ranks
        self._equal_modules: Any = WeakIdKeyDictionary()
        self._stale = False
        self._held = 0
        self._undoing = ExitStack()
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            self._undoing.callback(register(self._something_registered).remove)

    @property
    def named(self) -> list[Named]:
        """`in_order` with the names of the parameters."""
        named = named_parameters(self.models, self.optimizers)
        made = [(name, one) for name, one in named if not isinstance(one, UninitializedParameter) and one.is_leaf]
        numbers = [(name, one) for name, one in made if one.is_floating_point() or one.is_complex()]
        return [(name, one) for name, one in numbers if not one.is_inference()]

    def add(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Add models and optimizers whose tensors are equal on all ranks."""
        self.models += [model for model in models if all(model is not known for known in self.models)]
        self.optimizers += [one for one in optimizers if all(one is not optimizer for optimizer in self.optimizers)]
        self._note_equal(models, optimizers)
        self._look()

    def forget_dropped(self, gather: Callable[[list[bool]], list[list[bool]]]) -> None:
        """Forget models and optimizers that the loop has dropped on any rank, by all ranks' flags. Collective."""
        references: list[weakref.ref[Any]] = [*map(weakref.ref, self.models), *map(weakref.ref, self.optimizers)]
        if not references:
            return
        count = len(self.models)
        self.models, self.optimizers, self.in_order, self.added_parameters = [], [], [], []
        flags = gather([reference() is not None for reference in references])
        are_left = [all(left) for left in zip(*flags, strict=True)]
        self.models = _living(references[:count], are_left[:count])
        self.optimizers = _living(references[count:], are_left[count:])
        self._look()

    def refresh(self, looks_at_hooks: bool = False) -> None:
        """Find additions, removals and, if `looks_at_hooks`, swapped tensors since the last call."""
        are_hooked = not looks_at_hooks or all(starmap(has_accumulation_hook, self._watched.values()))
        if self._stale or self._held != self._count() or not are_hooked:
            self._look()

    def arrived(self, waiting: set[int]) -> bytes:
        """Return the `kind_of` each gradient in order: NOTHING unless the id of its parameter is in `waiting`."""
        return bytes([kind_of(one.grad) if id(one) in waiting else NOTHING for one in self.in_order])

    def are_equal(self) -> None:
        """Assume that all ranks have the same values now."""
        self._note_equal(self.models, self.optimizers)
        self.added_parameters = []

    def close(self) -> None:
        """Remove all hooks."""
        for key in [*self._watched]:
            self._unwatch(key)
        self._undoing.close()
        # The averaging owns the hook and this object: the cycle would keep the models alive.
        self.models, self.optimizers, self.in_order, self.added_parameters, self._equal = [], [], [], [], {}

    def _something_registered(self, *_: object) -> None:
        self._stale = True

    def _count(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _look(self) -> None:
        self._stale, self._held = False, self._count()
        self.in_order = [parameter for _, parameter in self.named]
        self.added_parameters = self._find_added_parameters()
        current = set(map(id, self.in_order))
        for key, watched in [*self._watched.items()]:
            if key not in current or not has_accumulation_hook(*watched):
                self._unwatch(key)
        for parameter in self.in_order:
            if id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter, _watch(parameter, self._arrived)

    def _find_added_parameters(self) -> list[Named]:
        named = [*named_parameters(self.models, self.optimizers)]
        self._equal = {id(parameter): parameter for _, parameter in named if id(parameter) in self._equal}
        parameters = [named_parameter for named_parameter in named if id(named_parameter[1]) not in self._equal]
        added = [module for model in self.models for module in model.modules() if module not in self._equal_modules]
        ids_of_added = {id(buffer) for module in added for buffer in buffers_of(module, recurse=False)}
        return parameters + [
            named_buffer for named_buffer in named_buffers(self.models) if id(named_buffer[1]) in ids_of_added
        ]

    def _note_equal(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._equal |= {id(parameter): parameter for _, parameter in named_parameters(models, optimizers)}
        for module in (module for model in models for module in model.modules()):
            self._equal_modules[module] = True

    def _unwatch(self, key: int) -> None:
        parameter, handle = self._watched.pop(key)
        handle.remove()
        forget_empty_hooks(parameter)


def _living(references: Sequence[weakref.ref[Any]], are_left: Sequence[bool]) -> list[Any]:
    """Return the objects that still exist and that no other rank has dropped."""
    objects = [reference() for reference, is_left in zip(references, are_left, strict=True) if is_left]
    return [living for living in objects if living is not None]


def _watch(parameter: torch.Tensor, arrived: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register the hook. torch only allows this while a parameter requires a gradient, but keeps it afterwards."""
    frozen = not parameter.requires_grad
    with as_plain_tensors():  # otherwise a frozen weight in bf16 would be converted to fp32 for training
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        if frozen:
            parameter.requires_grad_(False)
    return handle
