"""One direction of an RNN, a GRU or an LSTM: its properties, and its computation by torch's operators."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.kernels.linear import product
from nano_loop.kernels.memory import empty

#: torch's enum values of the modes, and the number of gates for each.
RELU, TANH, LSTM, GRU = range(4)
GATES = (1, 1, 4, 3)


class Recurrence(NamedTuple):
    """The properties of a layer other than its tensors."""

    mode: int  # `RELU`, `TANH`, `LSTM` or `GRU`
    #: The first row of each time step in the tensors of all steps, followed by the number of rows. The number of
    #: sequences per step never increases.
    offsets: Tensor
    is_packed: bool  # whether the number of sequences may decrease between time steps
    is_reversed: bool  # whether time steps are computed in reverse order
    in_bf16: bool  # whether products round their factors to bf16 if the CPU has instructions for it
    dtypes: tuple[torch.dtype, torch.dtype]  # of the outputs and of the cells

    @property
    def rounds(self) -> bool:
        """Whether the operands multiplied with weights are in bf16."""
        return self.in_bf16 and product.KERNEL.unavailable is None

    def operands(self, rows: int, width: int) -> Tensor:
        """Allocate operands. In bf16 the number of columns is even."""
        if self.rounds:
            return empty(rows, width + width % 2, dtype=torch.bfloat16)
        return empty(rows, width)

    def as_operands(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the format of operands."""
        if not self.rounds:
            return tensor.float().contiguous()
        return F.pad(tensor.bfloat16(), (0, tensor.size(1) % 2)).contiguous()


class Arguments(NamedTuple):
    """The tensors of a layer, all in bfloat16 or all in float32."""

    inputs: Tensor  # (rows, input size), with one row per time step and sequence
    input_weight: Tensor  # (gates · hidden, input size)
    hidden_weight: Tensor  # (gates · hidden, hidden)
    input_bias: Tensor | None  # (gates · hidden,)
    hidden_bias: Tensor | None  # (gates · hidden,)
    state: Tensor  # the initial hidden state: (batch, hidden)
    cells: Tensor | None  # the initial cells of an LSTM: (batch, hidden)


def by_operators(layer: Recurrence, tensors: Arguments) -> tuple[Tensor, ...]:
    """Compute `recurrence` step by step with torch's operators, for tensors of one dtype."""
    inputs, input_weight, hidden_weight, input_bias, hidden_bias, state, cells = tensors
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
            cells = torch.cat([now, cells[count:]])
        else:
            output = (x + h).tanh() if layer.mode == TANH else (x + h).relu()
        state = torch.cat([output, state[count:]])
        outputs[begin] = output
    all_outputs = torch.cat([outputs[begin] for begin, _ in steps])
    return (all_outputs, state) if cells is None else (all_outputs, state, cells)
