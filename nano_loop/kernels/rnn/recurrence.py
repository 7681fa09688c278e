"""One direction of a layer of an RNN, a GRU or an LSTM, with the recurrence by a C function (``recurrence.c``).

The products of all inputs, and those of all gradients, are one each over all steps. All is in fp32, on any CPU. In
reduced precision, products round what they multiply to bf16 where the CPU has the bf16 instructions of AVX-512.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_loop.kernels.build import CompiledKernel, scratch
from nano_loop.kernels.linear import fp32_product, product
from nano_loop.kernels.memory import BYTES, FP32, INT64, empty
from nano_loop.kernels.rounding import RULE
from nano_loop.patching.ownership import rule_for
from nano_loop.patching.torch_private import below_autocast, is_batched

KERNEL = CompiledKernel(
    "recurrence",
    {
        "recurrence_forward": (INT64, *(FP32,) * 11, BYTES),
        "recurrence_backward": (INT64, *(FP32,) * 13, BYTES),
    },
)

#: torch's numbers of the kinds of layers, and how many gates a unit of each has.
RELU, TANH, LSTM, GRU = range(4)
GATES = (1, 1, 4, 3)


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("mode", "steps", "batch", "hidden", "outputs", "is_reversed", "in_bf16")
    )


class Recurrence(NamedTuple):
    """What a layer is besides its tensors.

    Attributes
    ----------
    mode : int
        `RELU`, `TANH`, `LSTM` or `GRU`.
    offsets : torch.Tensor
        The first row of each step in the tensors of all steps, and the number of rows. No step has more sequences than
        the one before.
    is_reversed : bool
        Whether the last step is computed first.
    in_bf16 : bool
        Whether products round what they multiply to bf16, where the CPU has instructions for it.
    dtypes : tuple of torch.dtype
        Those of the outputs and of the cells.
    """

    mode: int
    offsets: Tensor
    is_reversed: bool
    in_bf16: bool
    dtypes: tuple[torch.dtype, torch.dtype]

    def sizes(self, inputs: Tensor, input_weight: Tensor, state: Tensor) -> _Call:
        """Return the sizes of a call, for the C function."""
        hidden = input_weight.size(0) // GATES[self.mode]
        sizes = state.size(0), hidden, state.size(1)
        return _Call(self.mode, self.offsets.numel() - 1, *sizes, self.is_reversed, self.in_bf16)


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


def recurrence(layer: Recurrence, arguments: Arguments) -> tuple[Tensor, ...]:
    """Compute one direction of a layer.

    Returns
    -------
    outputs : torch.Tensor
        Of shape (rows, outputs). The backward reads it: it must not be overwritten.
    state : torch.Tensor
        The outputs of the last step of each sequence, of shape (batch, outputs).
    cells : torch.Tensor
        The cells of an LSTM after the last step. Other layers return no third tensor.
    """
    results: tuple[Tensor, ...] = _RecurrentLayer.apply(layer, *arguments)  # type: ignore[no-untyped-call]
    return results


class _RecurrentLayer(torch.autograd.Function):
    """As `recurrence`."""

    @staticmethod
    def forward(ctx: Any, layer: Recurrence, *args: Any) -> tuple[Tensor, ...]:
        tensors = Arguments(*args)
        with below_autocast():
            kept, states = _forward(layer, tensors, any(ctx.needs_input_grad))
        ctx.layer = layer
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        outputs, state, *cells = states
        dtype, cell_dtype = layer.dtypes
        return outputs.to(dtype), state.to(dtype), *(tensor.to(cell_dtype) for tensor in cells)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(Arguments._fields)
        tensors, kept = Arguments(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        if all(gradient is None for gradient in gradients):
            return (None,) * (1 + count)
        # For a second derivative, and for many gradients at a time.
        if torch.is_grad_enabled() or any(gradient is not None and is_batched(gradient) for gradient in gradients):
            return None, *_differentiable(ctx.layer, tensors, gradients, ctx.needs_input_grad[1:])
        with below_autocast():
            computed = _backward(ctx.layer, tensors, kept, gradients, ctx.needs_input_grad[1:])
        return None, *(
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(computed, tensors, strict=True)
        )


def _forward(
    layer: Recurrence, tensors: Arguments, keeps: bool
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
    """Return what the backward reads besides the arguments, and the outputs and states in fp32."""
    inputs, input_weight, hidden_weight, input_bias, hidden_bias, projection, state, cells = tensors
    call, rows = layer.sizes(inputs, input_weight, state), inputs.size(0)
    gates = _product(layer, inputs, input_weight.t(), input_bias)
    bias = empty(gates.size(1)).zero_() if hidden_bias is None else _wide(hidden_bias)
    inner = empty(rows, call.hidden) if layer.mode == LSTM or (layer.mode == GRU and keeps) else None
    squashed = None if projection is None else empty(rows, call.hidden)
    outputs, last = empty(rows, call.outputs), empty(call.batch, call.outputs)
    last_cells = None if cells is None else empty(call.batch, call.hidden)
    _run(
        *("forward", call, layer.offsets, _wide(hidden_weight), bias, _wide(projection), _wide(state), _wide(cells)),
        *(gates, inner, squashed, outputs, last, last_cells),
    )
    kept = (None if GATES[layer.mode] == 1 else gates, inner, squashed, outputs)
    return kept, (outputs, last) if last_cells is None else (outputs, last, last_cells)


def _backward(
    layer: Recurrence,
    tensors: Arguments,
    kept: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments that need one, in fp32."""
    inputs, input_weight, hidden_weight, _, _, projection, state, cells = tensors
    call, rows = layer.sizes(inputs, input_weight, state), inputs.size(0)
    output_gradients, of_state, of_cells = [*gradients, None][:3]
    gates, inner, squashed, outputs = kept
    of_first = _copy(of_state, call.batch, call.outputs)
    of_first_cells = None if cells is None else _copy(of_cells, call.batch, call.hidden)
    # Of a GRU, the C function writes a part more: those of the hidden states begin with the new gate, and those of the
    # inputs end with it.
    hidden, is_gru = call.hidden, layer.mode == GRU
    of_gates, before = empty(rows, (GATES[layer.mode] + is_gru) * hidden), empty(rows, call.outputs)
    of_projected = None if projection is None else empty(rows, call.outputs)
    _run(
        *("backward", call, layer.offsets, _wide(hidden_weight), _wide(projection), _wide(state), _wide(cells)),
        *(gates, inner, outputs, _wide(output_gradients), of_first, of_first_cells, of_gates, of_projected, before),
    )
    input_gradients, hidden_gradients = (
        (of_gates[:, hidden:], of_gates[:, :-hidden]) if is_gru else (of_gates, of_gates)
    )
    (sums,) = fp32_product.product(torch.ones(1, rows, dtype=torch.float32, device="cpu"), of_gates)
    of_input_bias, of_hidden_bias = (sums[hidden:], sums[:-hidden]) if is_gru else (sums, sums)

    def in_order(gradient: Tensor) -> Tensor:
        return gradient.roll(-hidden, 0) if is_gru else gradient

    return (
        _product(layer, input_gradients, input_weight) if needs[0] else None,
        _product(layer, input_gradients.t(), inputs) if needs[1] else None,
        in_order(_product(layer, hidden_gradients.t(), before)) if needs[2] else None,
        of_input_bias.clone() if needs[3] else None,
        in_order(of_hidden_bias) if needs[4] else None,
        None if of_projected is None or squashed is None else _product(layer, of_projected.t(), squashed),
        of_first if needs[6] else None,
        of_first_cells if needs[7] else None,
    )


def _differentiable(
    layer: Recurrence, tensors: Arguments, gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of all arguments, computed in fp32 from operators that can be differentiated again."""
    with torch.enable_grad(), below_autocast():
        results = _by_operators(layer, Arguments(*(None if tensor is None else tensor.float() for tensor in tensors)))  # type: ignore[arg-type]
        used = [(a, b.float()) for a, b in zip(results, gradients, strict=True) if b is not None]
    outs, of_outs = zip(*used, strict=True)
    wanted: list[Any] = [tensor for tensor, is_needed in zip(tensors, needs, strict=True) if is_needed]
    computed = iter(
        torch.autograd.grad(outs, wanted, of_outs, create_graph=torch.is_grad_enabled(), materialize_grads=True)
    )
    return [next(computed) if is_needed else None for is_needed in needs]


def _by_operators(layer: Recurrence, tensors: Arguments) -> tuple[Tensor, ...]:
    """Return what `recurrence` does, step by step."""
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


def _product(layer: Recurrence, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product in fp32: of rounded matrices if that is asked for, and the CPU has instructions for it."""
    if layer.in_bf16 and product.supports(a, b, bias):
        if product.KERNEL.is_first_guess:
            return product.product(a, b, bias, dtype=torch.float32)
        computed = torch.mm(a.bfloat16(), b.bfloat16()).float()
        return computed if bias is None else computed.add_(bias)
    a, b, bias = a.float(), b.float(), _wide(bias)
    if rule_for(RULE) is not None:  # torch's operators may round
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return fp32_product.product(a, b, bias)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _copy(gradient: Tensor | None, *sizes: int) -> Tensor:
    """Return a copy of a gradient in fp32, or zeros."""
    return empty(*sizes).zero_() if gradient is None else empty(*sizes).copy_(gradient)


def _run(direction: str, call: _Call, *tensors: Tensor | None) -> None:
    memory = scratch(KERNEL.bytes_of(call, int(direction == "backward")))
    KERNEL(f"recurrence_{direction}", call, *tensors, memory)
