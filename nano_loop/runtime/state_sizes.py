"""The sizes of optimizers' states: those that exist, and those that a first step will create."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.patching.attributes import module_of


def bytes_of_tensor(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes; 0 for a lazy parameter."""
    if isinstance(tensor, NarrowWeight) and tensor.numbers.narrow is not None:
        return tensor.numbers.narrow.nbytes
    return 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()


def bytes_of_states(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's states in bytes."""
    values = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
    return sum(bytes_of_tensor(value) for value in values if isinstance(value, Tensor))


def bytes_of_temporaries(optimizer: Optimizer) -> int:
    """Return the bytes of temporary tensors of a ``foreach`` step: a group's parameters, but for SGD without decay."""
    groups = [group for group in optimizer.param_groups if group.get("foreach")]
    if isinstance(optimizer, SGD):
        groups = [group for group in groups if group["weight_decay"] or group["maximize"]]
    return max((sum(map(bytes_of_tensor, group["params"])) for group in groups), default=0)


def _is_torchs(kind: type[Optimizer]) -> bool:
    """Whether the class and the module of an optimizer contain only functions of torch."""
    waiting, names = [*vars(kind).values(), *vars(sys.modules[kind.__module__]).values()], set()
    while waiting:
        function = waiting.pop()
        if isinstance(function, FunctionType):
            names.add(module_of(function).partition(".")[0])
            waiting.append(getattr(function, "__wrapped__", None))
    return names <= {"torch", "nano_loop", "typing_extensions", *sys.stdlib_module_names}


def bytes_of_coming_states(optimizer: Optimizer, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the states, in a `dtype`, that a first step will create; 0 if they are not torch's.

    torch's own step computes it, for one tensor without memory per group. Replacements by the program are not called.
    """
    kinds: list[Any] = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    kind = kinds[0]
    if kind is Optimizer or not all(map(_is_torchs, kinds)):
        return 0
    coming = 0.0
    for group in optimizer.param_groups:
        held = [parameter for parameter in group["params"] if parameter.requires_grad and bytes_of_tensor(parameter)]
        new = [parameter for parameter in held if not optimizer.state.get(parameter)]
        if not new:
            continue
        like = torch.empty_like(max(new, key=torch.numel), device="meta", dtype=dtype).requires_grad_()
        like.grad = torch.empty_like(like)
        plain = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
        groups = [{**group, **{name: value for name, value in plain.items() if name in group}, "params": [like]}]
        trial = kind.__new__(kind)
        vars(trial).update(defaults=optimizer.defaults, state=defaultdict(dict), param_groups=groups)
        # Unknown states count as 0: LBFGS needs a closure. ASGD needs values once its states exist.
        with suppress(Exception), torch.no_grad():
            inspect.unwrap(kind.step)(trial)
        coming += bytes_of_states(trial) / like.numel() * sum(map(torch.numel, new))
    return int(coming)
