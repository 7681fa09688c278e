"""Notices who reads the gradient of a parameter, or the states of an optimizer: what writes into them reads them first.

``tensor.data`` and numpy write past torch's version counter, and so does what averages gradients in their memory. All
of them take the tensor from ``parameter.grad`` or ``optimizer.state``. An optimizer's step and ``zero_grad()`` do so as
well, and use the functions here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import process_wide

_GRADIENT: Any = torch.Tensor.grad

#: What is called before a parameter's gradient is read, by the id of the parameter.
on_read: dict[int, Callable[[], None]] = process_wide("observers of gradients, by parameter", {})

#: What is called with the states of an optimizer before they are read, by the id of a parameter.
on_state_read: dict[int, Callable[[Any], None]] = process_wide("observers of states, by parameter", {})

#: Returns ``parameter.grad``, for code that neither keeps it nor writes into it.
gradient_of: Callable[[Tensor], Tensor | None] = _GRADIENT.__get__
_set_gradient: Callable[[Tensor, Tensor | None], None] = _GRADIENT.__set__


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Set ``parameter.grad`` of parameters to None."""
    for parameter in parameters:
        _set_gradient(parameter, None)


def state_of(optimizer: Optimizer) -> Any:
    """Return ``optimizer.state`` of an optimizer of torch's, for code that neither keeps nor changes its tensors."""
    return vars(optimizer)["state"]


@contextmanager
def reads_noticed() -> Iterator[None]:
    """Call what is in `on_read` before a gradient is read, and `on_state_read` before states are."""
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Parameter, "grad", _noticed))
        stack.enter_context(replaced(Optimizer, "state", lambda _: _State()))
        stack.enter_context(replaced(nn.Module, "zero_grad", _dropping))
        yield


def _noticed(original: Any) -> Any:
    """Return the replacement of ``Parameter.grad``."""

    def get(self: nn.Parameter) -> Tensor | None:
        note = on_read.get(id(self))
        if note is not None:
            note()
        return gradient_of(self)

    return property(get, original.__set__, original.__delete__, original.__doc__)


class _State:
    """What ``state`` of optimizers is then. The states are kept where they always are."""

    def __get__(self, optimizer: Optimizer | None, kind: type | None = None) -> Any:
        if optimizer is None or "state" not in vars(optimizer):
            raise AttributeError("state")
        for note in [*on_state_read.values()]:
            note(state_of(optimizer))
        return state_of(optimizer)

    def __set__(self, optimizer: Optimizer, state: Any) -> None:
        vars(optimizer)["state"] = state

    def __delete__(self, optimizer: Optimizer) -> None:
        del vars(optimizer)["state"]


def _dropping(original: Callable[..., None]) -> Callable[..., None]:
    """Return the replacement of ``Module.zero_grad``, which reads each gradient to see whether there is one."""

    @functools.wraps(original)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        if set_to_none and on_read:
            drop_gradients(parameter for parameter in self.parameters() if id(parameter) in on_read)
        original(self, set_to_none)

    return zero_grad
