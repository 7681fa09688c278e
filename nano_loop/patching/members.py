"""The parameters and buffers of a module, even if its class overrides the methods that return them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_Tensor = TypeVar("_Tensor", bound=Tensor)


#: Yield the names with the parameters or buffers of a module, even if its class overrides these methods.
named_parameters_of, named_buffers_of = nn.Module.named_parameters, nn.Module.named_buffers


def parameters_of(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, even if its class overrides `parameters`, for example to return groups."""
    return (parameter for _, parameter in named_parameters_of(module, recurse=recurse))


def buffers_of(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    """Yield the buffers of a module, even if its class overrides `buffers`."""
    return (buffer for _, buffer in named_buffers_of(module, recurse=recurse))


def has_shape(tensor: Tensor) -> bool:
    """Whether a parameter or a buffer has a shape. Those of lazy modules get theirs in the first call."""
    return not is_lazy(tensor)


def has_shapes(module: nn.Module) -> bool:
    """Whether all parameters of a module have shapes."""
    return all(map(has_shape, parameters_of(module)))


def shaped(tensors: Iterable[_Tensor]) -> Iterator[_Tensor]:
    """Yield the tensors that have a shape."""
    return filter(has_shape, tensors)


def forget_gradients(module: nn.Module) -> None:
    """Set the gradients of a module's parameters to None."""
    for parameter in parameters_of(module):
        parameter.grad = None
