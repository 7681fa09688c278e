"""The layers of a chain as the C function knows them: linear, with a norm, an activation and a dropout behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: The numbers of norms in the C file.
NO_NORM, BATCH_NORM, LAYER_NORM = range(3)
#: The numbers of activations in the C file. The slope of the last is computed by its argument.
NONE, _RELU, _LEAKY_RELU, _ELU, _SIGMOID, _TANH, _SILU = range(7)
_NUMBERS = {nn.ReLU: _RELU, nn.Sigmoid: _SIGMOID, nn.Tanh: _TANH, nn.SiLU: _SILU}
OPERATORS: dict[int, Callable[[Tensor, float], Tensor]] = {
    NONE: lambda x, _: x,
    _RELU: lambda x, _: torch.relu(x),
    _LEAKY_RELU: F.leaky_relu,
    _ELU: F.elu,
    _SIGMOID: lambda x, _: torch.sigmoid(x),
    _TANH: lambda x, _: torch.tanh(x),
    _SILU: lambda x, _: F.silu(x),
}


class Activation(NamedTuple):
    """An activation as the C function knows it.

    Attributes
    ----------
    number : int
        Its number in the C file.
    slope : float
        The slope of LeakyReLU below 0; of ELU, the limit below 0.
    """

    number: int = NONE
    slope: float = 0.0

    @classmethod
    def of(cls, module: nn.Module) -> Activation | None:
        """Return the activation that a module computes, or None where the C function has none."""
        if type(module) is nn.LeakyReLU:
            slope = float(module.negative_slope)
            return cls(_LEAKY_RELU, slope) if slope > 0 else None  # else its values do not tell its slopes
        if type(module) is nn.ELU:
            limit = float(module.alpha)
            return cls(_ELU, limit) if limit > 0 else None
        number = _NUMBERS.get(type(module))
        return None if number is None else cls(number)


class Norm(NamedTuple):
    """A norm as the C function knows it.

    Attributes
    ----------
    number : int
        Its number in the C file.
    eps : float
        What is added to the variance.
    momentum : float
        The share of the batch in the running statistics of a batch norm.
    """

    number: int = NO_NORM
    eps: float = 0.0
    momentum: float = 0.0

    @classmethod
    def of(cls, module: nn.Module, size: int) -> Norm | None:
        """Return the norm of so many numbers that a module computes, or None where the C function has none."""
        if type(module) is nn.LayerNorm and module.normalized_shape == (size,) and module.bias is not None:
            return cls(LAYER_NORM, module.eps)
        if type(module) is nn.BatchNorm1d and module.num_features == size and module.affine:
            return cls(BATCH_NORM, module.eps, module.momentum) if module.momentum is not None else None
        return None


class ChainLayer(NamedTuple):
    """A linear layer, what is computed of its sums, and the probability that the dropout behind it drops a number."""

    inputs: int
    outputs: int
    has_bias: bool = True
    norm: Norm = Norm()
    activation: Activation = Activation()
    dropout: float = 0.0

    @property
    def keeps_arguments(self) -> bool:
        """Whether the slope is computed by something else than the output, which is kept beside it."""
        return self.activation.number == _SILU or (bool(self.dropout) and self.activation.number > _RELU)

    @property
    def is_linear(self) -> bool:
        """Whether its output are its sums."""
        return not (self.norm.number or self.activation.number or self.dropout)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its parameters: weight, bias, and weight and bias of the norm, as far as there are any."""
        return (self.outputs, self.inputs), *((self.outputs,),) * (self.has_bias + 2 * bool(self.norm.number))

    @property
    def constants(self) -> tuple[float, ...]:
        """The numbers that begin a `Layer` of the C file."""
        (norm, eps, momentum), (activation, slope) = self.norm, self.activation
        return self.inputs, self.outputs, norm, activation, eps, momentum, slope, 1 / (1 - self.dropout)
