"""What one direction of an RNN, a GRU or an LSTM is, and what it computes, by torch's operators."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.kernels.linear import product
from nano_loop.kernels.memory import empty

#: torch's numbers of the kinds of layers, and how many gates a unit of each has.
RELU, TANH, LSTM, GRU = range(4)
GATES = (1, 1, 4, 3)


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


def by_operators(layer: Recurrence, tensors: Arguments) -> tuple[Tensor, ...]:
    """Return what `recurrence` does, step by step, of tensors in one dtype."""
    inputs, input_weight, hidden_weight, input_bias, hidden_bias, projection, state, cells = tensors
    offsets = layer.offsets.tolist()
    steps = [*itertools.pairwise(offsets)]
    input_products, outputs = F.linear(inputs, input_weight, input_bias), {}
    for begin, end in reversed(steps) if layer.is_reversed else steps:
        count = end - begin
        x, before = input_products[begin:end], state[:count]
        h = F.linear(before, hidden_weight, hidden_bias)
        if layer.mode == GRU:
            (r, z, n), (of_r, of_z, of_n) = x.chunk(3, 1), h.chunk(3, 1)
            new = (n + (r + of_r).sigmoid() * of_n).tanh()
            output = new + (z + of_z).sigmoid() * (before - new)
        elif cells is not None:
            i, f, g, o = (x + h).chunk(4, 1)
            now = f.sigmoid() * cells[:count] + i.sigmoid() * g.tanh()
            output = o.sigmoid() * now.tanh()
            output = output if projection is None else F.linear(output, projection)
            cells = torch.cat([now, cells[count:]])
        else:
            output = (x + h).tanh() if layer.mode == TANH else (x + h).relu()
        state = torch.cat([output, state[count:]])
        outputs[begin] = output
    all_outputs = torch.cat([outputs[begin] for begin, _ in steps])
    return (all_outputs, state) if cells is None else (all_outputs, state, cells)
