"""The sizes of optimizers' states: those that exist, and those that a first step will create."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from nano_loop.kernels.narrow_weight import NarrowWeight

#: How many tensors of a parameter's size the first step of a group creates for it, by the name of torch's class.
#: Adagrad creates its states before, Adafactor only vectors of most parameters. Those of LBFGS are not known.
_STATES: dict[str, Callable[[dict[str, Any]], int]] = {
    **dict.fromkeys(("Adam", "AdamW"), lambda group: 2 + bool(group["amsgrad"])),
    **dict.fromkeys(("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "SparseAdam"), lambda group: 2),
    **dict.fromkeys(("ASGD", "Muon"), lambda group: 1),
    "RMSprop": lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    "SGD": lambda group: int(bool(group["momentum"])),
}


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


def bytes_of_coming_states(optimizer: Optimizer, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the states, in a `dtype`, that a first step will create; 0 if they are not torch's."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    count, coming = _STATES.get(kinds[0]), 0
    if count is None:
        return 0
    for group in optimizer.param_groups:
        held = [parameter for parameter in group["params"] if parameter.requires_grad and not is_lazy(parameter)]
        new = [parameter for parameter in held if not optimizer.state.get(parameter)]
        coming += count(group) * sum(parameter.numel() * (dtype or parameter.dtype).itemsize for parameter in new)
    return coming
