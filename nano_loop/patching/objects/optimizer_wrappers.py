"""Finds the optimizers inside optimizer wrappers, such as Lookahead and Accelerate's ``AcceleratedOptimizer``.

A wrapper is an `Optimizer` that stores another one in an attribute and calls its ``step``. Many wrappers do not call
``Optimizer.__init__``, so they have no hooks. The inner optimizer has the kernels, the learning rate and the hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from nano_loop.errors import NanoWarning, error_message
from nano_loop.patching.torch_private_optimizers import has_hooks
from nano_loop.patching.walk import find, walk


def innermost(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Replace each wrapper by the optimizers inside it, without duplicates.

    An optimizer without hooks and without an inner optimizer is omitted with a `NanoWarning`.
    """
    innermost = [optimizer for optimizer in walk(optimizers, _wrapped) if not _wrapped(optimizer)]
    for optimizer in innermost:
        if not has_hooks(optimizer):
            got = f"{type(optimizer).__name__} is not accelerated"
            expected = "it has no hooks, because its __init__ does not call Optimizer.__init__"
            message = error_message(got, expected, "Call super().__init__(params, defaults) there")
            warnings.warn(message, NanoWarning, stacklevel=2)
    return list(filter(has_hooks, innermost))


def _wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in attributes of `optimizer` that together hold all of its parameters."""
    if type(optimizer).step.__module__.partition(".")[0] == "torch":
        return []
    held = _parameters(optimizer)
    inner = [candidate for candidate in find(Optimizer, vars(optimizer)) if _parameters(candidate) <= held]
    covered: set[int] = set().union(*map(_parameters, inner))
    return inner if covered == held or not has_hooks(optimizer) else []


def _parameters(optimizer: Optimizer) -> set[int]:
    groups: Any = getattr(optimizer, "param_groups", ())  # may be missing without `Optimizer.__init__`
    return {id(parameter) for group in groups for parameter in group["params"]}
