"""What one direction of an RNN, a GRU or an LSTM is, and what it computes, by torch's operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.kernels.linear import product
from nano_loop.kernels.memory import empty
from nano_loop.patching.ownership import NO_RULES, by_rules

#: torch's numbers of the kinds of layers, and how many gates a unit of each has.
RELU, TANH, LSTM, GRU = range(4)
GATES = (1, 1, 4, 3)
_OPERATORS = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)


class Recurrence(NamedTuple):
    """What a layer is besides its tensors.

    Attributes
    ----------
    mode : int
        `RELU`, `TANH`, `LSTM` or `GRU`.
    offsets : torch.Tensor
        The first row of each step in the tensors of all steps, and the number of rows. No step has more sequences than
        the one before.
    is_packed : bool
        Whether steps may have fewer sequences than the one before.
    is_reversed : bool
        Whether the last step is computed first.
    in_bf16 : bool
        Whether products round what they multiply to bf16, where the CPU has instructions for it.
    dtypes : tuple of torch.dtype
        Those of the outputs and of the cells.
    """

    mode: int
    offsets: Tensor
    is_packed: bool
    is_reversed: bool
    in_bf16: bool
    dtypes: tuple[torch.dtype, torch.dtype]

    @property
    def rounds(self) -> bool:
        """Whether the operands that weights multiply are in bf16."""
        return self.in_bf16 and product.KERNEL.unavailable is None

    def operands(self, rows: int, width: int) -> Tensor:
        """Return memory for operands. In bf16 it has an even number of columns."""
        if self.rounds:
            return empty(rows, width + width % 2, dtype=torch.bfloat16)
        return empty(rows, width)

    def as_operands(self, tensor: Tensor) -> Tensor:
        """Return what is multiplied."""
        if not self.rounds:
            return tensor.float().contiguous()
        return F.pad(tensor.bfloat16(), (0, tensor.size(1) % 2)).contiguous()


class Arguments(NamedTuple):
    """The tensors of a layer: all in bfloat16 or float32.

    Attributes
    ----------
    inputs : torch.Tensor
        Of shape (rows, input size), with a row for each step and sequence.
    input_weight, hidden_weight : torch.Tensor
        The weights, of shapes (gates · hidden, input size) and (gates · hidden, outputs).
    input_bias, hidden_bias : torch.Tensor or None
        Of shape (gates · hidden,).
    projection : torch.Tensor or None
        The weight of a projection, of shape (outputs, hidden). Without one there are as many outputs as hidden units.
    state : torch.Tensor
        The outputs before the first step, of shape (batch, outputs).
    cells : torch.Tensor or None
        The cells of an LSTM before the first step, of shape (batch, hidden).
    """

    inputs: Tensor
    input_weight: Tensor
    hidden_weight: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None
    state: Tensor
    cells: Tensor | None


def by_operators(layer: Recurrence, sizes: Tensor, tensors: Arguments) -> tuple[Tensor, ...]:
    """Return what `recurrence` does, by torch's operator for packed sequences, which has derivatives of any order.

    `sizes` are the numbers of sequences of the steps. What a transform of `torch.func` makes of offsets has no memory.
    """
    inputs, *parameters, state, cells = tensors
    weights = [weight for weight in parameters if weight is not None]
    directions = 1 + layer.is_reversed  # no operator computes the reversed one alone
    states: Any = [each.expand(directions, *each.shape) for each in (state, cells) if each is not None]
    tensors_of_torch = inputs, sizes, states if layer.mode == LSTM else states[0], weights * directions
    with by_rules(NO_RULES):  # else it is computed in C
        outputs, *last = _OPERATORS[layer.mode](
            *tensors_of_torch, tensors.input_bias is not None, 1, 0.0, False, layer.is_reversed
        )
    return outputs[:, -state.size(1) :], *(each[-1] for each in last)
