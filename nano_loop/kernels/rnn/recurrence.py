"""One direction of a layer of an RNN, a GRU or an LSTM, with the recurrence by a C function (``recurrence.c``).

The products of many inputs, and those of all gradients, are one each over all steps. All is in fp32, on any CPU. In
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
from nano_loop.kernels.memory import BYTES, FLOATS, FP32, INT64, empty
from nano_loop.kernels.rounding import RULE
from nano_loop.patching.ownership import rule_for
from nano_loop.patching.torch_private import below_autocast, is_batched

KERNEL = CompiledKernel(
    "recurrence",
    {
        "recurrence_forward": (
            *(INT64, FLOATS, *(FP32,) * 6, FLOATS, *(FP32,) * 3, FLOATS, FP32, FLOATS, FP32, FP32, BYTES),
        ),
        "recurrence_backward": (
            *(INT64, *(FP32,) * 5, FLOATS, *(FP32,) * 4, FLOATS, FLOATS, FP32, FP32, FLOATS, FP32, FLOATS, FLOATS),
            *(*(FP32,) * 3, BYTES),
        ),
    },
)

#: torch's numbers of the kinds of layers, and how many gates a unit of each has.
RELU, TANH, LSTM, GRU = range(4)
GATES = (1, 1, 4, 3)
#: Number of inputs below which their product is computed in the steps, and bytes of weights up to which it is: nothing
#: of it is stored then, and all weights stay in a core's cache.
_FEW_INPUTS, _CACHED = 32, 1 << 20


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("mode", "steps", "batch", "inputs", "hidden", "outputs"),
            *("is_reversed", "is_packed", "is_trained", "is_rounded", "gradient_is_rounded"),
        )
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
        """Whether what is multiplied by weights is in bf16."""
        return self.in_bf16 and product.KERNEL.unavailable is None

    def operands(self, rows: int, width: int) -> Tensor:
        """Return memory for what is multiplied. In bf16 it has an even number of columns."""
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
        count, saved = len(Arguments._fields), ctx.saved_tensors  # a checkpoint recomputes them once
        tensors, kept = Arguments(*saved[:count]), _Kept(*saved[count:])
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


class _Kept(NamedTuple):
    """What the backward reads besides the arguments: memory of the C function, with a row for each step and sequence.

    Attributes
    ----------
    gates : torch.Tensor or None
        Those of a GRU or an LSTM.
    inner : torch.Tensor or None
        The cells of an LSTM; of a GRU, what the reset gate multiplies.
    squashed : torch.Tensor or None
        The outputs of the units before their projection.
    states : torch.Tensor
        The states before the first step, and the outputs, beside each other in the order in which they are computed.
    outputs : torch.Tensor or None
        The outputs in fp32, where `states` is not.
    """

    gates: Tensor | None
    inner: Tensor | None
    squashed: Tensor | None
    states: Tensor
    outputs: Tensor | None

    def before(self, layer: Recurrence, rows: int) -> Tensor:
        """Return the states before all steps of sequences of equal length."""
        return self.states[-rows:] if layer.is_reversed else self.states[:rows]

    def first(self, layer: Recurrence, rows: int) -> Tensor:
        """Return the states before the first step."""
        return self.states[rows:] if layer.is_reversed else self.states[:-rows]

    def behind(self, layer: Recurrence, rows: int) -> Tensor:
        """Return the outputs."""
        return self.states[:rows] if layer.is_reversed else self.states[-rows:]


def _sizes(layer: Recurrence, tensors: Arguments) -> _Call:
    """Return the sizes of a call, for the C function."""
    call = _Call(layer.mode, layer.offsets.numel() - 1, tensors.state.size(0))
    call.hidden, call.outputs = tensors.input_weight.size(0) // GATES[layer.mode], tensors.state.size(1)
    call.is_reversed, call.is_packed, call.is_rounded = layer.is_reversed, layer.is_packed, layer.rounds
    return call


def _is_computed_in_steps(layer: Recurrence, tensors: Arguments) -> bool:
    """Whether inputs are multiplied in the steps: where they are few, or the weights of both stay in the cache."""
    if not layer.rounds and rule_for(RULE) is not None:  # torch's operators may round
        return False
    gates, size = tensors.input_weight.shape
    return size < _FEW_INPUTS or gates * (size + tensors.state.size(1)) * (2 if layer.rounds else 4) <= _CACHED


def _forward(layer: Recurrence, tensors: Arguments, is_trained: bool) -> tuple[_Kept, tuple[Tensor, ...]]:
    """Return what the backward reads, and the outputs and states."""
    inputs, input_weight, hidden_weight, input_bias, hidden_bias, projection, state, cells = tensors
    call, rows, is_rnn = _sizes(layer, tensors), inputs.size(0), GATES[layer.mode] == 1
    call.is_trained = is_trained
    gates: Tensor | None = None
    in_steps: tuple[Any, ...] = (None, None, None)
    if _is_computed_in_steps(layer, tensors):
        call.inputs = inputs.size(1)
        in_steps = layer.as_operands(inputs), _wide(input_weight), _wide(input_bias)
        gates = empty(rows, GATES[layer.mode] * call.hidden) if is_trained and not is_rnn else None
    else:
        gates = _product(layer, inputs, input_weight.t(), input_bias)
    kept = _Kept(
        gates,
        empty(rows, call.hidden) if layer.mode == LSTM or (layer.mode == GRU and is_trained) else None,
        None if projection is None else layer.operands(rows, call.hidden),
        layer.operands(rows + call.batch, call.outputs),
        empty(rows, call.outputs)
        if layer.rounds and (layer.mode != LSTM or layer.dtypes[0] is torch.float32)
        else None,
    )
    first, states = kept.first(layer, rows), kept.behind(layer, rows)
    first.copy_(layer.as_operands(state))
    outputs = kept.outputs if layer.rounds else states
    last, last_cells = empty(call.batch, call.outputs), None if cells is None else empty(call.batch, call.hidden)
    weights, biases = (in_steps[1], _wide(hidden_weight)), (in_steps[2], _wide(hidden_bias))
    _run(
        "forward",
        call,
        *(layer.offsets, in_steps[0], *weights, *biases, _wide(projection), _wide(state)),
        *(first if layer.rounds else None, _wide(cells), gates, kept.inner, kept.squashed, outputs),
        *(states if layer.rounds else None, last, last_cells),
    )
    if outputs is None or layer.dtypes[0] is not torch.float32:
        outputs = states[:, : call.outputs]
    if is_rnn:
        kept = kept._replace(gates=None)
    return kept, (outputs, last) if last_cells is None else (outputs, last, last_cells)


def _backward(
    layer: Recurrence,
    tensors: Arguments,
    kept: _Kept,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments that need one."""
    inputs, input_weight, hidden_weight, _, _, projection, state, cells = tensors
    call, rows = _sizes(layer, tensors), inputs.size(0)
    call.inputs = inputs.size(1)
    output_gradients, of_state, of_cells = [*gradients, None][:3]
    if output_gradients is not None:
        call.gradient_is_rounded = layer.rounds and output_gradients.dtype is torch.bfloat16
        output_gradients = output_gradients.contiguous() if call.gradient_is_rounded else _wide(output_gradients)
    of_first = _copy(of_state, call.batch, call.outputs)
    of_first_cells = None if cells is None else _copy(of_cells, call.batch, call.hidden)
    # Of a GRU, the C function writes a part more: those of the hidden states begin with the new gate, and those of the
    # inputs end with it.
    hidden, is_gru = call.hidden, layer.mode == GRU
    width = (GATES[layer.mode] + is_gru) * hidden
    of_gates, sums = layer.operands(rows, width), empty(width)
    of_projected = None if projection is None else layer.operands(rows, call.outputs)
    before = layer.operands(rows, call.outputs) if layer.is_packed else kept.before(layer, rows)
    in_c = not layer.rounds and rule_for(RULE) is None  # else torch's operators may round
    products = [
        empty(*tensor.shape) if in_c and is_needed else None
        for tensor, is_needed in zip(tensors[:3], needs, strict=False)
    ]
    states = kept.behind(layer, rows)
    _run(
        "backward",
        call,
        *(layer.offsets, *map(_wide, (inputs, input_weight) if in_c else (None, None))),
        *map(_wide, (hidden_weight, projection, state)),
        *(kept.first(layer, rows) if layer.rounds else None, _wide(cells), kept.gates, kept.inner),
        *((kept.outputs, states) if layer.rounds else (states, None)),
        *(output_gradients, of_first, of_first_cells, of_gates, sums, of_projected, before, *products),
    )

    def in_order(gradient: Tensor) -> Tensor:
        return gradient.roll(-hidden, 0) if is_gru else gradient

    def of_weight(gradient: Tensor, multiplied: Tensor, weight: Tensor) -> Tensor:
        return _product(layer, gradient.t(), multiplied[:, : weight.size(1)], dtype=weight.dtype)

    if not in_c:
        of_sums = of_gates[:, hidden if is_gru else 0 : width]
        of_states = of_gates[:, : GATES[layer.mode] * hidden]
        products = [
            _product(layer, of_sums, input_weight, dtype=inputs.dtype) if needs[0] else None,
            of_weight(of_sums, inputs, input_weight) if needs[1] else None,
            in_order(of_weight(of_states, before, hidden_weight)) if needs[2] else None,
        ]
    of_input_bias, of_hidden_bias = (sums[hidden:], sums[:-hidden]) if is_gru else (sums, sums)
    return (
        *products,
        of_input_bias.clone() if needs[3] else None,
        in_order(of_hidden_bias) if needs[4] else None,
        None
        if of_projected is None or kept.squashed is None or projection is None
        else of_weight(of_projected[:, : call.outputs], kept.squashed, projection),
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


def _product(
    layer: Recurrence, a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a product: of rounded matrices if that is asked for and the CPU has instructions for it, else in fp32."""
    if layer.in_bf16 and product.supports(a, b, bias):
        if product.KERNEL.is_first_guess:
            return product.product(a, b, bias, dtype=dtype)
        computed = torch.mm(a.bfloat16(), b.bfloat16()).float()
        return computed if bias is None else computed.add_(bias)
    a, b, bias = a.float(), b.float(), _wide(bias)
    if rule_for(RULE) is not None:  # torch's operators may round
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return fp32_product.product(a, b, bias)


def _wide(tensor: Tensor | None) -> Any:
    """Return a tensor as C functions take it: contiguous, in fp32."""
    return None if tensor is None else tensor.float().contiguous()


def _copy(gradient: Tensor | None, *sizes: int) -> Tensor:
    """Return a copy of a gradient in fp32, or zeros."""
    return empty(*sizes).zero_() if gradient is None else empty(*sizes).copy_(gradient)


def _run(direction: str, call: _Call, *tensors: Tensor | None) -> None:
    memory = scratch(KERNEL.bytes_of(call, int(direction == "backward")))
    KERNEL(f"recurrence_{direction}", call, *tensors, memory)
