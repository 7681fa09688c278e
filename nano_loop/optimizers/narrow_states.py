"""States of an optimizer that stay in bf16 after a run until they are read.

If moments were converted at the end of a run, they would take 8 bytes per parameter in addition to the gradients, and a
run in bf16 would reach its peak there.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.torch_private import below_torch_functions


def in_fp32(state: Any) -> Any:
    """Return states with their bf16 tensors in fp32."""
    return map_tensors(lambda value: value.float() if value.dtype is torch.bfloat16 else value, state)


class NarrowStates(defaultdict[Any, Any]):
    """An optimizer's ``state`` that becomes fp32, tensor by tensor, before a method returns any; copies are torch's."""

    is_narrow = True

    @torch.inference_mode(False)  # tensors created in a caller's inference mode cannot be trained later
    def widen(self) -> None:
        """Convert the tensors in bf16 to fp32."""
        if not self.is_narrow:
            return
        with below_torch_functions():
            for key, state in _items(self):
                if isinstance(state, dict):
                    for name, value in state.items():
                        state[name] = in_fp32(value)
                else:
                    self[key] = in_fp32(state)
        self.is_narrow = False

    def __reduce__(self) -> tuple[Any, ...]:
        self.widen()
        return defaultdict, (self.default_factory,), None, None, iter(_items(self))


_items = defaultdict.items  # returns the items of a `NarrowStates` without converting them


def _copied(states: NarrowStates) -> defaultdict[Any, Any]:
    states.widen()
    return defaultdict(states.default_factory, _items(states))


def _widening(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: NarrowStates, /, *args: Any) -> Any:
        self.widen()
        return method(self, *args)

    return call


# With another `__iter__`, C code that copies a dictionary calls `__getitem__` as well.
_READS = ("__getitem__", "__iter__", "get", "items", "pop", "popitem", "setdefault", "values")
for _name in (*_READS, "__eq__", "__ne__", "__or__", "__ror__", "__repr__"):
    setattr(NarrowStates, _name, _widening(_name))
for _name in ("copy", "__copy__"):
    setattr(NarrowStates, _name, _copied)


def keep_narrow(optimizer: Optimizer) -> None:
    """Keep the states of an optimizer in bf16 until they are read."""
    states = NarrowStates(getattr(optimizer.state, "default_factory", None), optimizer.state)
    if type(optimizer.state) is not defaultdict or _holders(optimizer) > _holders(SimpleNamespace(state={})):
        states.widen()  # in the dictionaries of parameters, to which a wrapper may hold references
    else:
        optimizer.state = states


def _holders(owner: Any) -> int:
    return sys.getrefcount(owner.state)


def take_back(optimizer: Optimizer) -> None:
    """Restore torch's class of the states of an optimizer, without converting them."""
    states = optimizer.state
    if isinstance(states, NarrowStates):
        optimizer.state = defaultdict(states.default_factory, _items(states))
