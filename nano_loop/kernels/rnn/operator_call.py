"""A call of one of torch's operators of RNNs, GRUs and LSTMs: its arguments, shapes and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.rnn import recurrent_layer
from nano_loop.kernels.rnn.recurrent_layer import GATES, LSTM

_MATRIX, _SEQUENCES = 2, 3


class OperatorCall(NamedTuple):
    """The arguments of one of torch's operators.

    Attributes
    ----------
    mode : int
        One of those of `recurrent_layer.Recurrence`.
    inputs : torch.Tensor
        Of shape (steps, batch, input size), or (batch, steps, input size) if `batch_first`; packed, of shape (rows,
        input size).
    batch_sizes : torch.Tensor or None
        How many sequences the steps of packed inputs have.
    states : tuple of torch.Tensor
        The states before the first step, and the cells of an LSTM.
    weights : tuple of torch.Tensor
        Those of the directions of all layers.
    is_trained : bool
        Whether there will be a backward.
    """

    mode: int
    inputs: Tensor
    batch_sizes: Tensor | None
    states: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    is_trained: bool = False

    @property
    def is_projected(self) -> bool:
        """Whether the outputs of an LSTM are a projection of its units."""
        return self.states[0].size(-1) != self.states[-1].size(-1)

    @property
    def is_onednns(self) -> bool:
        """Whether torch leaves the layers to oneDNN."""
        return self.mode == LSTM and self.batch_sizes is None and not self.is_projected

    @property
    def of_torch(self) -> tuple[Any, ...]:
        """The arguments of torch's operator of an LSTM of sequences of equal length."""
        return (self.inputs, [*self.states], [*self.weights], *self[5:-1])

    @property
    def multiplications(self) -> int:
        """Those of one layer and direction of an LSTM of sequences of equal length; 0 of all else."""
        if self.mode != LSTM or self.batch_sizes is not None or self.inputs.dim() != _SEQUENCES:
            return 0
        first, second, _ = self.inputs.shape
        return first * second * sum(weight.numel() for weight in self.weights[:_MATRIX])

    @property
    def layers(self) -> list[recurrent_layer.Arguments]:
        """The arguments of the directions of all layers, each with the operator's inputs."""
        count = _MATRIX * (1 + self.has_biases) + self.is_projected
        layers = []
        for at, states in enumerate(zip(*(state.unbind(0) for state in self.states), strict=True)):
            input_weight, hidden_weight, *others = self.weights[at * count : (at + 1) * count]
            input_bias, hidden_bias = others[:2] if self.has_biases else (None, None)
            layers.append(
                recurrent_layer.Arguments(
                    self.inputs,
                    input_weight,
                    hidden_weight,
                    input_bias,
                    hidden_bias,
                    projection=others[-1] if self.is_projected else None,
                    state=states[0],
                    cells=states[1] if self.mode == LSTM else None,
                )
            )
        return layers


def offsets_of(call: OperatorCall) -> Tensor | None:
    """Return the rows at which the steps begin, and their number; None for steps that torch refuses."""
    if call.inputs.dim() != (_SEQUENCES if call.batch_sizes is None else _MATRIX) or not call.inputs.numel():
        return None
    if call.states[0].dim() != _SEQUENCES:
        return None
    batch = call.states[0].size(1)
    if call.batch_sizes is None:
        return offsets_of_equal(call) if call.inputs.size(0 if call.batch_first else 1) == batch else None
    sizes = call.batch_sizes.tolist()
    if sizes != sorted(sizes, reverse=True) or sizes[0] != batch or sizes[-1] < 1 or sum(sizes) != len(call.inputs):
        return None
    return torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)


def offsets_of_equal(call: OperatorCall) -> Tensor:
    """Return the rows at which the steps of sequences of equal length begin, and their number."""
    batch, steps = call.inputs.shape[:2] if call.batch_first else call.inputs.shape[1::-1]
    return torch.arange(0, steps * batch + 1, batch, dtype=torch.int64, device="cpu")


def are_shapes_right(call: OperatorCall) -> bool:
    """Whether the shapes are those of torch's modules: the C function reads what they say."""
    directions, (_, batch, outputs), hidden = 1 + call.bidirectional, call.states[0].shape, call.states[-1].size(-1)
    count, gates = call.num_layers * directions, GATES[call.mode] * hidden
    if any(state.shape[:-1] != (count, batch) for state in call.states) or not min(outputs, hidden):
        return False
    of_biases: list[Sequence[int]] = [(gates,)] * (2 * call.has_biases)
    shapes = []
    for at in range(count):
        size = call.inputs.size(-1) if at < directions else outputs * directions
        shapes += [(gates, size), (gates, outputs), *of_biases, *[(outputs, hidden)] * call.is_projected]
    return [weight.shape for weight in call.weights] == shapes
